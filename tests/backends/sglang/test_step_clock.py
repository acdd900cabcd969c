"""The clock of a step: when its requests were received."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from plait.backends.adapter.scheduler_settings import SglangSettings
from plait.backends.sglang.step_clock import StepClock, Tick
from tests.backends.sglang.fake_scheduler import Rank, Request, Setup


def test_requests_arrive_in_the_middle_of_a_step_on_average() -> None:
    clock = StepClock()
    clock.ticked(Tick(1.0, ()))
    clock.ticked(Tick(1.4, ()))
    assert clock.received_s == pytest.approx(1.2)


def test_what_arrives_while_the_engine_is_idle_has_not_waited() -> None:
    clock = StepClock()
    clock.ticked(Tick(1.0, ()))
    clock.ticked(Tick(1.4, ()))
    clock.rested()
    assert clock.received_s == 1.4


def test_a_call_is_as_old_as_it_was_when_it_was_received() -> None:
    """The first call finds the engine idle. The second one arrives in a step of 0.4 s, at an age of 0.1 s."""
    now_s = [0.0]
    rank = Rank(Setup(), lambda: now_s[0], SglangSettings(scheduler="slo"))

    def step(*requests: Request) -> None:
        rank.begin_step([*requests, *rank._poll_timeout_aborts()])
        rank.end_step()
        now_s[0] += 0.4

    aged = SimpleNamespace(custom_params={"plait_age_ms": 100.0})
    first, second = (Request(name, [1] * 40, 50, aged) for name in ("first", "second"))
    step(first)
    step()
    step(second)
    assert first.plait_call.received_s == 0.0
    assert now_s[0] == pytest.approx(1.2)
    assert second.plait_call.received_s == pytest.approx(0.8 - 0.2)
    assert second.plait_call.arrived_s == pytest.approx(0.6 - 0.1)
