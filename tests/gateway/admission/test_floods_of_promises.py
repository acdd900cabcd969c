"""A tenant that sends many calls whose promises can be kept: the others' calls, promised or not, do not wait for them.

A prompt takes 1 ms for each token.
"""

from __future__ import annotations

import pytest

from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.room import AHEAD_S, OWN_S, PROMISED_AHEAD_S
from tests.gateway.admission.waiting_fleet import WaitingFleet

LONG = 500
GATEWAYS = 2
"""The gateways with prompts in the engine. Each sends its part of what several tenants may have there."""


def fleet_of(*tenants: str) -> WaitingFleet:
    """An engine that computes a prompt and serves calls on time first. These tenants have sent calls lately."""
    fleet = WaitingFleet("x", ahead_s=AHEAD_S, is_busy=True, urgent_first=True)
    for tenant in tenants:
        call = fleet.enter(tenant, tokens=64)
        fleet.first_byte(call)
        fleet.end(call)
    return fleet


def flood(fleet: WaitingFleet, ttft_s: float, calls: int = 20) -> list[Waiting]:
    """Calls of the first tenant."""
    return [fleet.enter("a", tokens=LONG, ttft_s=ttft_s) for _ in range(calls)]


def sent(calls: list[Waiting]) -> int:
    return sum(call.is_sent for call in calls)


@pytest.mark.parametrize("ttft_s", [5.0, 9.0])
def test_an_engine_is_sent_a_part_of_a_second_of_a_flood(ttft_s: float) -> None:
    fleet = fleet_of("a", "b")
    calls = flood(fleet, ttft_s)
    assert sent(calls) == OWN_S / GATEWAYS * 1000 / LONG
    assert fleet.enter("b", tokens=LONG).is_sent


@pytest.mark.parametrize("tenants", ["a", "ab", "abc"])
def test_a_call_that_is_due_sooner_does_not_wait_for_a_flood(tenants: str) -> None:
    fleet = fleet_of(*tenants)
    calls = flood(fleet, 9.0)
    assert 0 < sent(calls) < len(calls)
    urgent = fleet.enter(tenants[-1], tokens=LONG, ttft_s=1.0)
    assert urgent.is_sent


def test_promises_that_get_shorter_do_not_fill_an_engine() -> None:
    fleet = fleet_of("a", "b")
    calls = [fleet.enter("a", tokens=LONG, ttft_s=9.9 - number / 10) for number in range(20)]
    assert sent(calls) == PROMISED_AHEAD_S / GATEWAYS * 1000 / LONG


def test_a_tenant_alone_may_have_more_of_its_promises_there() -> None:
    fleet = fleet_of("a")
    calls = flood(fleet, 9.0)
    assert sent(calls) == PROMISED_AHEAD_S * 1000 / LONG


def test_a_flood_whose_deadlines_are_far_goes_as_calls_without_one() -> None:
    far, plain = fleet_of("a", "b"), fleet_of("a", "b")
    calls, others = flood(far, 600.0), [plain.enter("a", tokens=LONG) for _ in range(20)]
    assert [call.is_sent for call in calls] == [call.is_sent for call in others]
    assert sent(calls) < len(calls)
    assert far.enter("b", tokens=LONG, ttft_s=1.0).is_sent
