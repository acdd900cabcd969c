"""Calls that leave and come back have their old place."""

from __future__ import annotations

import pytest

import plait.gateway.admission.admission
from plait.backends.errors import LimitError
from plait.gateway.admission.admission import GRACE_S, KeptPlaces
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.tenants import TenantLimits
from plait.policy.admission.conversations import join
from plait.policy.types import Call
from tests.gateway.admission.waiting_fleet import WaitingFleet

CALL = Call("c", "m", 100, 64, [5], prompt_hash=7)


def waiting(number: int = 3, tenant: str = "a", call: Call = CALL) -> Waiting:
    return Waiting(tenant, 100, number=number, call=call)


def test_a_place_is_kept_until_some_time_after_the_client_was_to_come_back() -> None:
    for again_s, number in ((20.0 + GRACE_S, 3), (20.1 + GRACE_S, None)):
        places = KeptPlaces()
        places.keep(waiting(), 20.0)
        assert places.take(waiting(9), again_s) == number
        assert places.take(waiting(9), again_s) is None, "once"


@pytest.mark.parametrize(
    "other",
    [
        waiting(tenant="b"),
        waiting(call=CALL._replace(model="n")),
        waiting(call=CALL._replace(prompt_hash=8)),
        waiting(call=CALL._replace(block_hashes=[6])),
        waiting(call=CALL._replace(prompt_tokens=101)),
        waiting(call=CALL._replace(output_limit=1)),
    ],
)
def test_another_call_gets_no_place(other: Waiting) -> None:
    places = KeptPlaces()
    places.keep(waiting(), 20.0)
    assert places.take(other, 1.0) is None
    assert places.take(waiting(9, call=CALL._replace(call_id="d")), 1.0) == 3, "its id is a new one"


def test_not_all_places_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plait.gateway.admission.admission, "MOST_KEPT", 2)
    places, calls = KeptPlaces(), [waiting(number, str(number)) for number in range(3)]
    for call in calls:
        places.keep(call, 20.0)
    assert [places.take(call, 0.0) for call in calls] == [None, 1, 2]


def test_a_ticket_that_is_back_joins_before_those_that_came_after_it() -> None:
    queue: dict[Waiting, None] = {}
    deferred = waiting(2)
    for ticket in (waiting(1), waiting(4), waiting(6), deferred):
        join(queue, ticket)
    back = waiting(3)
    back.is_back = True
    join(queue, back)
    assert [ticket.number for ticket in queue] == [1, 3, 4, 6, 2]


def test_a_call_that_comes_back_goes_before_those_that_came_after_it() -> None:
    fleet = WaitingFleet("x")
    fleet.router.engines["x"].view.slots = 1
    running, *calls = [fleet.enter("a", 64, prefix=number) for number in range(4)]
    error = fleet.admission.leave(calls[0], fleet.now_s)
    fleet.entered.remove(calls[0])
    assert isinstance(error, LimitError)
    assert (error.code, error.retry_after_s) == ("waiting", 1.0)
    assert "for about 1 s more" in error.message
    assert fleet.admission.waiting("m") == 2
    back = fleet.enter("a", 64, prefix=1)
    assert (back.is_back, back.number) == (True, calls[0].number)
    assert fleet.admission.queue.backlogs["m"].outlook(back)[0] == 1
    fleet.first_byte(running)
    fleet.end(running)
    assert [call.is_sent for call in (back, *calls[1:])] == [True, False, False]


def test_a_call_that_comes_back_is_not_refused_again() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_waiting=1))
    fleet.router.engines["x"].view.slots = 1
    _, call = fleet.enter("a", 64), fleet.enter("a", 64, prefix=1)
    fleet.admission.leave(call, fleet.now_s)
    fleet.entered.remove(call)
    fleet.enter("a", 64, prefix=2)
    with pytest.raises(LimitError):
        fleet.enter("a", 64, prefix=3)
    assert fleet.enter("a", 64, prefix=1).is_back
