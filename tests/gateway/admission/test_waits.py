"""What a call waits for, from when on. A prompt takes 1 ms for each token, and an engine is sent those of a second."""

from __future__ import annotations

from math import inf
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.lines import LEAST_GAIN_S
from plait.gateway.admission.tenants import TenantLimits
from plait.gateway.admission.waits import LineChange, Wait, WaitReason, seconds_by_reason
from plait.policy.types import Objective
from tests.gateway.admission.test_lines import SOON_S, full_fleet
from tests.gateway.admission.test_session_gates import closed_fleet
from tests.gateway.admission.waiting_fleet import WaitingFleet

LONG = 3_000


def waits(call: Waiting) -> list[tuple[WaitReason, float]]:
    """With the times to a hundredth of a second: an engine is looked at again a moment after it has room."""
    return [(wait.why, round(wait.since_s, 2)) for wait in call.waits or ()]


def test_a_call_that_is_sent_at_once_has_not_waited() -> None:
    fleet = WaitingFleet("x")
    assert fleet.enter().waits is None


def test_the_first_of_a_line_waits_until_its_engine_has_computed_prompts() -> None:
    fleet = WaitingFleet("x", is_busy=True)
    first, second = fleet.enter(tokens=LONG), fleet.enter(tokens=LONG)
    fleet.pass_time(2.0)
    assert waits(second) == [("prompts", 0.0)]
    fleet.first_byte(first)
    assert second.is_sent
    assert second.waited_for(inf) == {"prompts": 2.0}


def test_an_engine_without_a_free_slot() -> None:
    fleet = WaitingFleet("x")
    fleet.router.engines["x"].view.slots = 1
    first = fleet.enter(tokens=64)
    fleet.first_byte(first)
    second = fleet.enter(tokens=64)
    fleet.pass_time(1.5)
    fleet.end(first)
    assert second.is_sent
    assert second.waited_for(inf) == {"slot": 1.5}


def test_who_waits_behind_others_waits_for_its_turn_and_then_for_the_engine() -> None:
    fleet = WaitingFleet("x", is_busy=True)
    calls = [fleet.enter(tokens=LONG) for _ in range(4)]
    assert [waits(call) for call in calls[2:]] == [[("turn", 0.0)]] * 2
    for call in calls[:3]:
        fleet.pass_time(2.0)
        fleet.first_byte(call)
    assert [call.is_sent for call in calls] == [True] * 4
    assert [call.waited_for(inf) for call in calls] == [
        None,
        {"prompts": 2.0},
        {"turn": 2.0, "prompts": 2.0},
        {"turn": 4.0, "prompts": 2.0},
    ]


def test_the_reason_of_the_first_changes() -> None:
    fleet = WaitingFleet("x")
    view = fleet.router.engines["x"].view
    view.slots = 3
    sent, _, waiting = (fleet.enter(tokens=LONG) for _ in range(3))
    fleet.pass_time(1.0)
    view.slots = 2
    fleet.first_byte(sent)
    fleet.pass_time(0.5)
    fleet.end(sent)
    assert waiting.is_sent
    assert waits(waiting) == [("prompts", 0.0), ("slot", 1.0)]
    assert waiting.waited_for(inf) == {"prompts": 1.0, "slot": 0.5}


def test_slots_that_are_kept_from_a_tenant() -> None:
    fleet, running, waiting = full_fleet()
    since_s = fleet.now_s
    assert waits(waiting[0]) == [("tenant_share", since_s)]
    fleet.pass_time(3.0)
    fleet.end(running[0])
    fleet.pass_time(SOON_S)
    assert waiting[0].waited_for(inf) == {"tenant_share": 3.0}


def test_a_call_that_passes_has_waited_for_its_turn() -> None:
    fleet = WaitingFleet("x", is_busy=True, urgent_first=True)
    fleet.enter(tokens=LONG)
    behind = fleet.enter(tokens=LONG)
    first, _, last = (fleet.enter(tokens=LONG, ttft_s=9.9) for _ in range(3))
    fleet.pass_time(2.0)
    fleet.first_byte(first)
    assert (behind.is_sent, last.is_sent) == (False, True)
    assert last.waited_for(inf) == {"turn": 2.0}


def test_a_session_that_is_held() -> None:
    fleet = closed_fleet()
    first = fleet.enter(tokens=6_000, session="first")
    held = fleet.enter(tokens=5_000, session="second")
    fleet.pass_time(4.0)
    fleet.end(first)
    fleet.pass_time(20.0)
    found = held.waited_for(inf)
    assert held.is_sent
    assert found is not None
    assert list(found) == ["session"]
    assert found["session"] > 4.0


def test_a_tenant_with_as_many_calls_running_as_it_may() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_running=1))
    first, second, third = (fleet.enter() for _ in range(3))
    fleet.pass_time(1.5)
    fleet.first_byte(first)
    fleet.end(first)
    assert second.waited_for(inf) == {"max_running": 1.5}
    fleet.go(third)
    assert third.waited_for(fleet.now_s) == {"max_running": 1.5}


def test_a_call_that_is_placed_late_waits_in_its_line() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_running=2), is_busy=True)
    first, second, third = (fleet.enter(tokens=LONG) for _ in range(3))
    fleet.pass_time(1.0)
    fleet.first_byte(first)
    fleet.end(first)
    fleet.pass_time(2.0)
    fleet.first_byte(second)
    assert third.is_sent
    assert third.waited_for(inf) == {"max_running": 1.0, "prompts": 2.0}


@pytest.mark.parametrize("who", ["first", "second"])
def test_the_client_of_a_waiting_call_goes(who: str) -> None:
    fleet = WaitingFleet("x", is_busy=True)
    sent, *calls = [fleet.enter(tokens=LONG) for _ in range(4)]
    fleet.pass_time(1.0)
    fleet.first_byte(sent)
    fleet.pass_time(1.0)
    call = calls[1 if who == "first" else 2]
    fleet.go(call)
    assert call.waited_for(fleet.now_s) == ({"turn": 1.0, "prompts": 1.0} if who == "first" else {"turn": 2.0})


def test_a_call_that_is_given_up_has_waited_until_then() -> None:
    fleet = WaitingFleet("x", max_wait_s=6.5, is_busy=True)
    fleet.enter(tokens=LONG)
    fleet.enter(tokens=LONG)
    victim = fleet.enter(tokens=LONG, objective=Objective.THROUGHPUT)
    fleet.pass_time(1.0)
    fleet.enter(tokens=LONG)
    assert victim.error is not None
    assert victim.waited_for(fleet.now_s) == {"turn": 1.0}


# Changes of line.


def test_a_call_that_changes_lines_says_where_when_and_what_it_gains() -> None:
    fleet = WaitingFleet("x", "y", is_busy=True)
    fleet.router.health.unreachable("y")
    calls = [fleet.enter(tokens=LONG) for _ in range(4)]
    fleet.pass_time(1.5)
    fleet.router.health.answered("y", {"m": None})
    fleet.settle()
    (change,) = calls[3].line_changes
    assert (change.from_id, change.to_id, change.at_s) == ("x", "y", 1.5)
    assert change.gain_s is not None
    assert change.gain_s > LEAST_GAIN_S
    assert calls[3].waited_for(inf) == {"turn": 1.5}
    assert [call.line_changes for call in calls[:3]] == [()] * 3


def test_a_call_whose_engine_goes_waits_in_another_line() -> None:
    fleet = WaitingFleet("x", "y", is_busy=True)
    fleet.router.health.unreachable("y")
    _, second, third = (fleet.enter(tokens=LONG) for _ in range(3))
    fleet.pass_time(1.0)
    fleet.router.engines["y"].view.slots = 1
    fleet.router.health.answered("y", {"m": None})
    fleet.router.health.unreachable("x")
    fleet.settle()
    assert [call.line_changes for call in (second, third)] == [(LineChange("x", "y", 1.0, None),)] * 2
    assert waits(second) == [("prompts", 0.0), ("slot", 1.0)]
    assert waits(third) == [("turn", 0.0)]


# Sums.


@given(
    records=st.lists(st.tuples(st.sampled_from(get_args(WaitReason)), st.floats(0.0, 10.0)), min_size=1),
    rest_s=st.floats(0.0, 10.0),
)
def test_a_call_waits_for_one_thing_at_a_time(records: list[tuple[WaitReason, float]], rest_s: float) -> None:
    call, now_s = Waiting("t", 1, None), 5.0  # type: ignore[arg-type]
    for why, after_s in records:
        call.wait_for(why, now_s)
        now_s += after_s
    assert call.waits
    times = [wait.since_s for wait in call.waits]
    assert times == sorted(set(times))
    assert times[0] == 5.0
    assert all(one.why != other.why for one, other in zip(call.waits, call.waits[1:], strict=False))
    found = seconds_by_reason(call.waits, now_s + rest_s) or {}
    assert sum(found.values()) == pytest.approx(now_s + rest_s - 5.0, abs=0.001 * len(get_args(WaitReason)))


def test_seconds_are_summed_by_reason_and_what_took_no_time_is_left_out() -> None:
    waits = [Wait("turn", 1.0), Wait("prompts", 2.0), Wait("turn", 2.5), Wait("slot", 4.0), Wait("prompts", 4.0)]
    assert seconds_by_reason(waits, 5.23456) == {"turn": 2.5, "prompts": 1.735}
    assert seconds_by_reason([Wait("turn", 1.0)], 1.0) is None
