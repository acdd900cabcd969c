"""Calls that wait before engines with different contexts: none goes where it has no room."""

from __future__ import annotations

from plait.gateway.admission.backlog import Waiting
from tests.gateway.admission.waiting_fleet import WaitingFleet

LONG_TOKENS, SHORT_TOKENS = 32_768, 2_000


def uneven_fleet() -> WaitingFleet:
    """Engine x takes long prompts, engine y only short ones."""
    fleet = WaitingFleet("x", "y", is_busy=True)
    offer(fleet, x=LONG_TOKENS, y=SHORT_TOKENS)
    return fleet


def offer(fleet: WaitingFleet, **contexts: int) -> None:
    for engine, tokens in contexts.items():
        fleet.router.health.answered(engine, {"m": tokens})


def engines(fleet: WaitingFleet, *calls: Waiting) -> list[str | None]:
    return [fleet.engine_of(call) for call in calls]


def test_an_idle_engine_takes_no_waiting_call_that_it_has_no_room_for() -> None:
    fleet = uneven_fleet()
    calls = [fleet.enter(tokens=3_000) for _ in range(4)]
    fleet.pass_time(0.5)
    assert engines(fleet, *calls) == ["x"] * 4
    assert fleet.sent == [calls[0]]
    assert len(fleet.serve(4)) == 4


def test_an_idle_engine_takes_a_waiting_call_that_it_has_room_for() -> None:
    fleet = uneven_fleet()
    fleet.router.health.unreachable("y")
    long, short = fleet.enter(tokens=6_000), fleet.enter(tokens=1_900)
    assert engines(fleet, long, short) == ["x", "x"]
    offer(fleet, y=SHORT_TOKENS)
    fleet.settle()
    assert engines(fleet, long, short) == ["x", "y"]


def test_calls_that_wait_are_placed_anew_when_their_engine_has_no_room_any_more() -> None:
    fleet = WaitingFleet("x", "y", is_busy=True)
    calls = [fleet.enter(tokens=3_000) for _ in range(6)]
    waiting = [call for call in calls if fleet.engine_of(call) == "y" and not call.is_sent]
    assert len(waiting) == 2
    offer(fleet, x=LONG_TOKENS, y=SHORT_TOKENS)
    fleet.settle()
    assert engines(fleet, *waiting) == ["x", "x"]
    assert len(fleet.serve(6)) == 6


def test_calls_without_room_anywhere_are_sent_all_the_same() -> None:
    """The engine judges them: the gateway's count may be wrong."""
    fleet = WaitingFleet("x", "y")
    offer(fleet, x=SHORT_TOKENS, y=1_000)
    calls = [fleet.enter(tokens=3_000) for _ in range(3)]
    assert engines(fleet, *calls) == ["x"] * 3
    assert fleet.serve(3) == calls


def test_calls_move_to_an_engine_with_room_that_comes_up() -> None:
    fleet = uneven_fleet()
    fleet.router.health.unreachable("x")
    calls = [fleet.enter(tokens=3_000) for _ in range(3)]
    assert engines(fleet, *calls) == ["y"] * 3
    offer(fleet, x=LONG_TOKENS)
    fleet.settle()
    assert engines(fleet, *calls) == ["y", "x", "x"], "the first has been sent"
