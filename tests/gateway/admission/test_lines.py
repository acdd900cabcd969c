"""The lines of engines that several tenants share: who goes although others wait, and what the room counts."""

from __future__ import annotations

import pytest

from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.room import RESERVED_S, SLOTS_A_RESERVED, Room
from tests.gateway.admission.waiting_fleet import WaitingFleet

SOON_S = 0.01
"""An engine is looked at again within this time."""


def room_of(fleet: WaitingFleet) -> Room:
    return fleet.admission.queue.lines.room


def full_fleet() -> tuple[WaitingFleet, list[Waiting], list[Waiting]]:
    """An engine of which one slot is reserved, and a heavy tenant's calls that run there, and those that wait.

    A light tenant had a call there.
    """
    fleet = WaitingFleet("x")
    fleet.router.engines["x"].view.slots = SLOTS_A_RESERVED
    first = fleet.enter("light", 64)
    fleet.first_byte(first)
    fleet.end(first)
    calls = []
    for _ in range(SLOTS_A_RESERVED + 2):
        calls.append(fleet.enter("heavy", 64))
        if calls[-1].is_sent:
            fleet.first_byte(calls[-1])
    running = [call for call in calls if call.is_sent]
    return fleet, running, calls[len(running) :]


def test_a_light_tenants_call_goes_through_a_reserved_slot_although_others_wait() -> None:
    fleet, running, waiting = full_fleet()
    assert (len(running), len(waiting)) == (SLOTS_A_RESERVED - 1, 3)
    call = fleet.enter("light", 64)
    fleet.pass_time(SOON_S)
    assert call.is_sent
    assert not any(one.is_sent for one in waiting)
    second = fleet.enter("light", 64)
    fleet.pass_time(SOON_S)
    assert not second.is_sent, "no slot is left"
    fleet.first_byte(call)
    fleet.end(call)
    assert second.is_sent, "the slot is still for the light tenant"


def test_a_heavy_tenants_next_call_goes_when_one_of_its_own_ends() -> None:
    fleet, running, waiting = full_fleet()
    fleet.end(running[0])
    fleet.pass_time(SOON_S)
    assert [call.is_sent for call in waiting] == [True, False, False]
    fleet.pass_time(50.0)
    assert not waiting[1].is_sent


def test_the_reserved_slot_is_taken_a_minute_after_the_light_tenant_has_gone() -> None:
    fleet, _, waiting = full_fleet()
    fleet.pass_time(59.0)
    assert not waiting[0].is_sent
    fleet.pass_time(1.0 + SOON_S)
    last = fleet.enter("heavy", 64)
    fleet.pass_time(SOON_S)
    assert [call.is_sent for call in (*waiting, last)] == [True, False, False, False]


def test_a_slot_that_is_kept_is_taken_once_it_need_not_be_although_nothing_happens() -> None:
    fleet = WaitingFleet("x")
    fleet.router.engines["x"].view.slots = 2
    fleet.go(fleet.enter("light", 64))
    running, waiting = fleet.enter("heavy", 64), fleet.enter("heavy", 64)
    fleet.first_byte(running)
    fleet.pass_time(SOON_S)
    assert not waiting.is_sent
    fleet.pass_time(2 * RESERVED_S)
    assert waiting.is_sent


# Where a tenant's calls go beside others'.


def test_a_light_tenants_call_joins_a_flood_rather_than_wait_behind_another_one_of_its_own() -> None:
    """It overtakes what waits, and delays what was sent only by the tenant's part."""
    fleet = WaitingFleet("x", "y")
    flood = [fleet.enter("heavy", 64) for _ in range(400)]
    for call in flood:
        fleet.first_byte(call)
    for call in flood:
        if fleet.engine_of(call) == "y":
            fleet.end(call)
    for _ in range(3):
        call = fleet.enter("light", 3_000)
        assert fleet.engine_of(call) == "y", "nobody waits there, so each second of delay counts"
    fleet.go(call)
    for _ in range(4):
        fleet.enter("heavy", 3_000)
    assert fleet.engine_of(fleet.enter("light", 3_000)) == "x"


def test_what_a_tenant_has_on_other_engines_does_not_count() -> None:
    fleet = WaitingFleet("x", "y")
    for _ in range(20):
        fleet.enter("heavy", 64)
    fleet.enter("light", 64)
    lines, views = fleet.admission.queue.lines, {name: engine.view for name, engine in fleet.router.engines.items()}
    calls = {name: [one for one in fleet.entered if fleet.engine_of(one) == name] for name in views}
    for name, view in views.items():
        light = 1 + sum(one.tenant == "light" for one in calls[name])
        expected = min(1.0, light / (0.5 * (1 + len(calls[name]))))
        assert lines._sent_weight([view], "light", 0.0) == pytest.approx(expected)
    assert lines._sent_weight([*views.values()], "light", 0.0) == pytest.approx(2 / (0.5 * 22))


# What the room counts.


def test_a_call_that_is_gone_in_the_moment_of_its_sending_gives_its_room_back() -> None:
    fleet = WaitingFleet("x")
    call = fleet.enter("a")
    assert room_of(fleet).sent == {("x", "a"): 1}
    fleet.go(call)
    assert not room_of(fleet).sent


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "its client goes"])
def test_a_call_that_has_waited_gives_its_room_back(*, ends: bool) -> None:
    fleet = WaitingFleet("x")
    first, second = fleet.enter("a", 1_500), fleet.enter("b", 1_500)
    assert room_of(fleet).sent == {("x", "a"): 1}, "what waits takes none"
    fleet.serve(1)
    assert room_of(fleet).sent == {("x", "b"): 1}
    assert (first.is_sent, second.is_sent) == (True, True)
    if ends:
        fleet.serve(1)
    else:
        fleet.go(second)
    assert not room_of(fleet).sent


def test_a_call_that_leaves_before_it_was_sent_takes_no_room() -> None:
    fleet = WaitingFleet("x")
    first, second = fleet.enter("a", 1_500), fleet.enter("b", 1_500)
    fleet.go(second)
    assert room_of(fleet).sent == {("x", "a"): 1}
    fleet.go(first)
    assert not room_of(fleet).sent


def test_a_call_that_another_engine_takes_counts_there() -> None:
    fleet = WaitingFleet("x", "y", is_busy=True)
    fleet.router.health.unreachable("y")
    calls = [fleet.enter("a", 3_000) for _ in range(3)]
    fleet.router.health.answered("y", {"m": None})
    fleet.settle()
    assert [fleet.engine_of(call) for call in calls] == ["x", "x", "y"]
    assert room_of(fleet).sent == {("x", "a"): 1, ("y", "a"): 1}
    fleet.serve(3)
    assert not room_of(fleet).sent
