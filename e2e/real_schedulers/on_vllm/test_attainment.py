"""What the driver reports of the promises that the engine kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from e2e.real_schedulers.on_vllm.engine import Engine
from e2e.real_schedulers.on_vllm.fixtures import Build

TIME_OF_DAY = 1_000_000.0
"""When every request is sent."""


class Clock:
    """Stands still until it is set; requests that are made here arrive at once, `late_s` after they were sent."""

    now_s = 1000.0
    late_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def time_of_day(self) -> float:
        return TIME_OF_DAY + self.late_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def promising(build: Build, clock: Clock) -> Callable[[], Engine]:
    def build_with_clock() -> Engine:
        engine = build(plait={"scheduler": "fcfs"}, max_batch_tokens=100)
        engine.driver._clock = clock
        engine.driver._wall_clock = clock.time_of_day
        return engine

    return build_with_clock


def run(engine: Engine, clock: Clock) -> None:
    while engine.scheduler.has_unfinished_requests():
        clock.now_s += 1.0
        engine.step()


def attainment(engine: Engine) -> float | None:
    return engine.driver.report(None, None).scheduler.slo_attainment


def ask(engine: Engine, name: str, output_tokens: int = 3, **annotations: Any) -> None:
    engine.add([ord(name), *range(89)], output_tokens, name=name, arrival_time=TIME_OF_DAY, **annotations)


def test_it_is_what_the_engine_did(promising: Callable[[], Engine], clock: Clock) -> None:
    """A step takes a second and has room for one prompt; an asynchronous engine's tokens come a step later."""
    engine = promising()
    ask(engine, "a")
    run(engine, clock)
    assert attainment(engine) is None, "it was promised nothing"
    ask(engine, "b", plait_ttft_ms=2500, plait_tpot_ms=1000)
    ask(engine, "c", plait_ttft_ms=1500)
    run(engine, clock)
    assert attainment(engine) == 0.5
    ask(engine, "d", plait_jct_ms=90_000)
    ask(engine, "e", plait_ttft_ms=9000, plait_jct_ms=90_000, plait_age_ms=9000)
    run(engine, clock)
    assert attainment(engine) == 0.5, "e had waited elsewhere"


def test_a_call_that_is_given_up_counts_if_it_was_late(promising: Callable[[], Engine], clock: Clock) -> None:
    engine = promising()
    for name in "ab":
        ask(engine, name, plait_ttft_ms=500)
    engine.abort("a")
    assert attainment(engine) is None
    clock.now_s += 1.0
    engine.abort("b")
    assert attainment(engine) == 0.0
    ask(engine, "c", plait_ttft_ms=5000, output_tokens=50)
    for _ in range(4):
        engine.step()
    engine.abort("c")
    assert attainment(engine) == 0.5, "it had its first token"


@pytest.mark.parametrize(("late_s", "waited_s"), [(0.4, 0.4), (90.0, 1.0), (-90.0, 0.0)])
def test_a_request_was_received_when_the_api_server_had_it(
    promising: Callable[[], Engine], clock: Clock, late_s: float, waited_s: float
) -> None:
    """It may have waited for as long as an iteration; a greater difference is that of two machines' clocks."""
    engine = promising()
    ask(engine, "a", output_tokens=50)
    for _ in range(4):
        step = engine.scheduler.schedule()
        clock.now_s += 1.0
        engine.finish_step(step)
    clock.late_s = late_s
    ask(engine, "b")
    request = engine.scheduler.requests["b"]
    assert clock.now_s - request.plait_call.received_s == pytest.approx(waited_s)
