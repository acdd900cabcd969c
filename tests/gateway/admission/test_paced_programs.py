"""Calls of programs wait for their tenant's rates in order, instead of being refused."""

from __future__ import annotations

from math import inf

import pytest

from plait.backends.errors import LimitError
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.tenants import BURST_S, TenantLimits
from tests.gateway.admission.waiting_fleet import WaitingFleet

RATE = 2.0
BURST = int(BURST_S * RATE)
SOON_S = 0.01


def program(fleet: WaitingFleet, calls: int) -> list[Waiting]:
    return [fleet.enter(tokens=1, passes=True) for _ in range(calls)]


def test_each_goes_in_its_turn_by_the_rate() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(calls_per_s=RATE), ahead_s=60.0)
    calls = program(fleet, BURST + 120)
    assert sum(call.is_sent for call in calls) == BURST
    last = calls[-1]
    place, expected_s = fleet.admission.outlook(last, fleet.now_s)
    assert (place, round(expected_s, 6)) == (120, 60.0)
    for seconds in range(1, 61):
        fleet.pass_time(1.0 if seconds > 1 else 1.0 + SOON_S)
        assert [call.is_sent for call in calls] == [number < BURST + RATE * seconds for number in range(len(calls))]
    waited = last.waited_for(inf) or {}
    assert {why: round(waited_s, 6) for why, waited_s in waited.items()} == {"rate": 60.0}


def test_tokens_count_as_well() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(tokens_per_s=11.0), ahead_s=60.0)
    calls = program(fleet, 12)
    assert [call.is_sent for call in calls] == [True] * 10 + [False] * 2
    fleet.pass_time(1.0 + SOON_S)
    assert [call.is_sent for call in calls[10:]] == [True, False]


def test_other_calls_are_refused_until_the_program_has_gone() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(calls_per_s=RATE), ahead_s=60.0)
    program(fleet, BURST + 4)
    with pytest.raises(LimitError) as caught:
        fleet.enter()
    assert caught.value.retry_after_s == pytest.approx(2.5)
    fleet.pass_time(2.5 + SOON_S)
    assert fleet.enter(tokens=1).is_sent


def test_one_that_is_gone_gives_its_turn_back() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(calls_per_s=RATE), ahead_s=60.0)
    *_, gone, last = program(fleet, BURST + 2)
    fleet.go(gone)
    late = fleet.enter(tokens=1, passes=True)
    fleet.pass_time(1.0 + SOON_S)
    assert (gone.is_sent, last.is_sent, late.is_sent) == (False, True, True)


@pytest.mark.parametrize(("per_s", "left_s"), [(2 * RATE, 15.0), (RATE / 2, 60.0), (inf, 0.0)])
def test_other_limits_hold_for_those_that_wait(per_s: float, left_s: float) -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(calls_per_s=RATE), ahead_s=60.0)
    *_, last = program(fleet, BURST + 100)
    fleet.pass_time(20.0 + SOON_S)
    fleet.limits = TenantLimits(calls_per_s=per_s)
    fleet.admission.limits_changed(fleet.now_s)
    fleet.settle()
    if left_s:
        assert fleet.admission.outlook(last, fleet.now_s)[1] == pytest.approx(left_s, abs=1.0)
        fleet.pass_time(left_s - 1.0)
        assert not last.is_sent
    fleet.pass_time(2.0)
    assert last.is_sent
