"""Hit-ratio groups: the proportions, and the bound within which every waiting call has its turn."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.scheduling.in_order import GROUPS, HitRatioGroups
from tests.examples import examples

WEIGHT = GROUPS * (GROUPS + 1) // 2
"""55: the sum of the groups' weights 1 to 10."""


@pytest.mark.parametrize(
    ("cached", "tokens", "group"), [(0, 100, 0), (9, 100, 0), (10, 100, 1), (99, 100, 9), (100, 100, 9), (0, 1, 0)]
)
def test_the_group_is_the_cached_share_in_tenths(cached: int, tokens: int, group: int) -> None:
    assert HitRatioGroups().group(cached, tokens) == group


def test_every_group_gets_picks_in_proportion() -> None:
    groups, picks = HitRatioGroups(), [0] * GROUPS
    for _ in range(10 * WEIGHT):
        group, _ = next(groups.turns([[0]] * GROUPS))
        groups.charge(group)
        picks[group] += 1
    assert picks == [10 * (group + 1) for group in range(GROUPS)]


def test_looking_ahead_changes_nothing_and_says_what_charging_will_bring() -> None:
    groups = HitRatioGroups()
    queues = [[f"{group}-{n}" for n in range(group)] for group in range(GROUPS)]
    ahead = list(groups.turns(queues))
    assert ahead == list(groups.turns(queues))
    assert sorted(call for _, call in ahead) == sorted(call for queue in queues for call in queue)
    one_by_one = []
    while any(queues):
        group, call = next(groups.turns(queues))
        groups.charge(group)
        queues[group].remove(call)
        one_by_one.append((group, call))
    assert one_by_one == ahead


def test_an_idle_group_saves_up_nothing() -> None:
    groups = HitRatioGroups()
    busy: list[list[int]] = [[]] * 9 + [[1]]
    for _ in range(1000):
        groups.charge(next(groups.turns(busy))[0])
    both = [list(range(100)), *[[]] * 8, list(range(100))]
    first = [group for group, _ in groups.turns(both)][:22]
    assert first.count(0) in {2, 3}, "one in eleven, and one for joining"


arrivals = st.lists(st.lists(st.integers(0, GROUPS - 1), max_size=6), min_size=1, max_size=60)


@settings(deadline=None, max_examples=examples(200))
@given(arrivals=arrivals)
def test_the_pth_call_of_a_group_waits_no_longer_than_proven(arrivals: list[list[int]]) -> None:
    groups = HitRatioGroups()
    queues: list[list[tuple[int, int]]] = [[] for _ in range(GROUPS)]
    picks = 0
    for step in [*arrivals, *[[]] * sum(map(len, arrivals))]:
        for group in step:
            position = len(queues[group]) + 1
            queues[group].append((picks, position))
        for group, (since, position) in [*groups.turns(queues)][:1]:
            groups.charge(group)
            queues[group].pop(0)
            picks += 1
            assert picks - since <= ceil(WEIGHT * position / (group + 1)) + WEIGHT
            assert picks - since <= ceil(WEIGHT * position / (group + 1)) + GROUPS, "what the derivation gives"
    assert not any(queues)
