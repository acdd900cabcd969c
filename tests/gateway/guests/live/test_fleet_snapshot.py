"""The snapshot of the fleet: which calls are held, and for what."""

from __future__ import annotations

from plait.gateway.guests.live.feed import Feed
from plait.gateway.guests.live.fleet_snapshot import MOST_HELD, FleetNews, HeldTurn, fleet_news
from plait.policy.sessions.session_gate import FIRST_BETWEEN_S
from tests.gateway.admission.test_session_gates import KV_TOKENS, closed_fleet
from tests.gateway.admission.waiting_fleet import WaitingFleet
from tests.gateway.calls.scripted_engines import FakeHttp, gateway


async def news(fleet: WaitingFleet) -> FleetNews:
    async with gateway(FakeHttp()) as made:
        feed = Feed(fleet.router, made.relay, lambda tenant: f"tenant {tenant}")
        return fleet_news(fleet.router, fleet.admission, feed, fleet.now_s)


async def test_a_held_call_says_what_it_waits_for() -> None:
    fleet = closed_fleet()
    fleet.enter(tokens=6_000, session="first")
    fleet.enter(tokens=5_000, session="second")
    fleet.enter(tokens=4_500, session="third")
    fleet.pass_time(2.0)
    one, other = (await news(fleet)).held
    assert one == HeldTurn("m", "tenant a", 5_010, 2.0, 1, FIRST_BETWEEN_S, 6_010, KV_TOKENS)
    assert (other.tokens, other.place, other.expected_s) == (4_510, 2, 2 * FIRST_BETWEEN_S)


async def test_only_the_first_of_many_held_calls_are_told() -> None:
    fleet = closed_fleet()
    fleet.enter(tokens=6_000, session="first")
    for number in range(MOST_HELD + 3):
        fleet.enter(tokens=5_000, session=f"held {number}")
    found = await news(fleet)
    assert [turn.place for turn in found.held] == [*range(1, MOST_HELD + 1)]
    assert found.models[0].held_sessions == MOST_HELD + 3
    assert b"held 0" not in str(found).encode(), "a session's name is its client's"
