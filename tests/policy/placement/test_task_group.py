"""Allocating a task group: numbers to check by hand, and every choice against a second implementation."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.placement.task_group import Part, allocate


def part(
    name: str, *, load: float = 0, first: float = 10, following: float = 10, decode: float = 0, room: float = inf
) -> Part:
    """An engine where a call takes 10 of the KV cache; a decode takes `decode` and 1 more for each further call."""
    return Part(name, load, first, following, lambda calls: decode + calls - 1 if calls else 0.0, 10, 10, room)


def test_equal_engines_share_a_group() -> None:
    assert allocate([part("a"), part("b")], {}, 16) == {"a": 8, "b": 8}


def test_a_group_of_sixteen_spreads_by_room() -> None:
    assert allocate([part("a", room=100), part("b", room=60)], {}, 16) == {"a": 10, "b": 6}


def test_without_room_anywhere_the_cheapest_engines_wait() -> None:
    assert allocate([part("a", room=20), part("b", room=10), part("c", load=500)], {}, 4) == {"a": 2, "b": 1, "c": 1}
    assert allocate([part("a", room=20), part("b", room=10)], {}, 8) == {"a": 4, "b": 4}


def test_an_engine_with_load_ahead_gets_fewer() -> None:
    # a completes n calls at 11 n - 1, b at 44 + 11 n - 1: four calls later
    assert allocate([part("a"), part("b", load=44)], {}, 10) == {"a": 7, "b": 3}


def test_members_that_share_a_prefix_stay_together_until_there_is_no_room() -> None:
    parts = [part(name, first=1_000, following=10, room=60) for name in "abc"]
    assert allocate(parts, {}, 6) == {"a": 6}
    assert allocate(parts, {}, 8) == {"a": 6, "b": 2}
    assert allocate(parts, {"c": 2}, 5) == {"c": 5}


def test_a_prefix_is_computed_again_where_waiting_for_it_costs_more() -> None:
    # With the n-th call a completes at 100 + 11 (n - 1), and computes 10 more; b at 100, and computes 100.
    parts = [part(name, first=100, following=10) for name in "ab"]
    assert allocate(parts, {}, 9) == {"a": 9}
    assert allocate(parts, {}, 10) == {"a": 9, "b": 1}


def test_places_that_there_are_stay() -> None:
    assert allocate([part("a"), part("b")], {"a": 3}, 8) == {"a": 4, "b": 4}
    assert allocate([part("a"), part("b")], {"a": 6}, 7) == {"a": 6, "b": 1}
    assert allocate([part("a"), part("b")], {"a": 6}, 6) == {"a": 6}


class Engine(NamedTuple):
    """Numbers of a `Part`: each call takes `need` of `room`, and a decode of n calls takes `decode` x (1 + n / 4)."""

    load: float
    first: float
    following: float
    decode: float
    need: int
    room: float

    def part(self, name: str) -> Part:
        """The part of this engine."""
        load, first, following, decode, need, room = self
        return Part(name, load, first, following, lambda calls: decode * (1 + calls / 4), need, need, room)

    def completion(self, calls: int) -> float:
        """When so many calls would have completed."""
        work = self.first + (calls - 1) * self.following + self.decode * (1 + calls / 4) if calls > 0 else 0.0
        return self.load + work


SECONDS = st.integers(0, 60).map(float)
ROOM = st.just(inf) | st.integers(0, 120).map(float)
ENGINES = st.lists(
    st.builds(Engine, SECONDS, SECONDS, SECONDS, SECONDS, st.integers(1, 20), ROOM), min_size=1, max_size=5
)


def greedy(engines: list[Engine], wanted: int) -> dict[str, int]:
    """Each call by a scan of all engines; the first of the cheapest with room, or of all if none has."""
    counts = [0] * len(engines)
    for _ in range(wanted):
        fits = [i for i, engine in enumerate(engines) if (counts[i] + 1) * engine.need <= engine.room]
        costs = {}
        for i in fits or range(len(engines)):
            prefill = engines[i].following if counts[i] else engines[i].first
            costs[i] = engines[i].completion(counts[i] + 1) + prefill
        counts[min(costs, key=lambda i: (costs[i], i))] += 1
    return {str(i): count for i, count in enumerate(counts) if count}


@given(engines=ENGINES, wanted=st.integers(1, 30))
def test_allocation_is_greedy(engines: list[Engine], wanted: int) -> None:
    parts = [engine.part(str(i)) for i, engine in enumerate(engines)]
    assert allocate(parts, {}, wanted) == greedy(engines, wanted)


@given(engines=ENGINES, wanted=st.integers(1, 30), kept=st.integers(0, 30))
def test_allocating_in_two_steps_is_allocating_at_once(engines: list[Engine], wanted: int, kept: int) -> None:
    parts = [engine.part(str(i)) for i, engine in enumerate(engines)]
    before = allocate(parts, {}, min(kept, wanted))
    assert sum(before.values()) == min(kept, wanted)
    assert allocate(parts, before, wanted) == allocate(parts, {}, wanted)


def test_cost_is_completion_and_the_added_prefill() -> None:
    one = part("a", load=5, first=100, following=10, decode=3)
    assert (one.work_s(0), one.work_s(1), one.work_s(3)) == (0, 103, 125)
    assert one.marginal_cost_s(0) == pytest.approx(5 + 103 + 100)
    assert one.marginal_cost_s(2) == pytest.approx(5 + 125 + 10)
