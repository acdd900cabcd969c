"""Reservations, from the first call of a task group to the last."""

from __future__ import annotations

import pytest

from plait.policy.placement.reservation import NOTHING_RESERVED, Reservation, Reservations
from plait.policy.types import Call, Placement, PlacementReason, TaskGroup

WINDOW_S = 10.0


def call(group: str | None = "g", model: str = "m") -> Call:
    return Call("c", model, 1, 64, [], group=None if group is None else TaskGroup(group, 4))


def placed(places: dict[str, int] | None) -> Placement:
    return Placement("a", PlacementReason.GROUP, 0, 1, places=places)


def test_a_reservation_lasts_until_its_calls_have_ended() -> None:
    reservations = Reservations(WINDOW_S)
    assert reservations.of(call()) == NOTHING_RESERVED
    reservations.book(call(), placed({"a": 1}), 1.0)
    assert reservations.of(call()) == Reservation({"a": 1}, 1, 1.0)
    reservations.book(call(), placed({}), 2.0)
    assert reservations.of(call()) == Reservation({}, 2, 2.0)
    for left in (1, 0):
        reservations.leave(call())
        assert reservations.running == left
        reservations.check()
    assert len(reservations) == 0


def test_a_call_that_is_placed_otherwise_leaves_the_places() -> None:
    reservations = Reservations(WINDOW_S)
    reservations.book(call(), placed({"a": 1}), 1.0)
    reservations.book(call(), placed(None), 2.0)
    assert reservations.of(call()) == Reservation({"a": 1}, 2, 2.0)


def test_a_call_of_no_group_reserves_nothing() -> None:
    reservations = Reservations(WINDOW_S)
    reservations.book(call(None), placed(None), 1.0)
    reservations.leave(call(None))
    assert (reservations.of(call(None)), len(reservations)) == (None, 0)


def test_groups_and_models_are_apart() -> None:
    reservations = Reservations(WINDOW_S)
    for number, key in enumerate((("g", "m"), ("g", "n"), ("h", "m"))):
        reservations.book(call(*key), placed({"a": number + 1}), 1.0)
    assert [reservations.of(call(*key)) for key in (("g", "m"), ("g", "n"), ("h", "m"), ("h", "n"))] == [
        *(Reservation({"a": number}, 1, 1.0) for number in (1, 2, 3)),
        NOTHING_RESERVED,
    ]


@pytest.mark.parametrize("running", [True, False])
def test_a_group_that_is_not_seen_for_longer_than_the_window_has_no_places(running: bool) -> None:
    reservations = Reservations(WINDOW_S)
    reservations.book(call(), placed({"a": 3}), 1.0)
    if not running:
        reservations.leave(call())
    reservations.age(11.0)
    assert reservations.of(call()) == Reservation({"a": 3}, int(running), 1.0)
    reservations.age(11.1)
    assert reservations.of(call()) == (Reservation({}, 1, 1.0) if running else NOTHING_RESERVED)
    assert len(reservations) == running


def test_a_lost_engine_ends_the_reservations_with_places_on_it() -> None:
    reservations = Reservations(WINDOW_S)
    reservations.book(call("g"), placed({"a": 1, "b": 2}), 1.0)
    reservations.book(call("h"), placed({"b": 2}), 1.0)
    reservations.restrict({"m": ["a", "b"]})
    assert reservations.of(call("g")) == Reservation({"a": 1, "b": 2}, 1, 1.0)
    reservations.restrict({"m": ["b"]})
    assert reservations.of(call("g")) == Reservation({}, 1, 1.0)
    assert reservations.of(call("h")) == Reservation({"b": 2}, 1, 1.0)
    reservations.restrict({})
    assert reservations.of(call("h")) == Reservation({}, 1, 1.0)
