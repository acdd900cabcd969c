"""How the calls of a task group are divided among engines, against a search of all divisions."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.delay import CallToPlace, offer
from plait.policy.placement.least_delay import WORTH, Place, least_delay, least_sum_s, used
from plait.policy.types import Slo
from tests.policy.costs.test_delay import OUTPUT_TOKENS, Engine, call_of, situation

PARTS = 8
"""The search divides calls into so many parts."""


def searched(places: list[Place], calls: int) -> float:
    """The least sum of all ways to give each place a number of parts of calls."""
    parts = calls * PARTS
    best = inf
    for bars in combinations(range(parts + len(places) - 1), len(places) - 1):
        edges = [-1, *bars, parts + len(places) - 1]
        taken = [(right - left - 1) / PARTS for left, right in pairwise(edges)]
        costs = [place.first_s * n + place.growth_s * n * n / 2 for place, n in zip(places, taken, strict=True)]
        best = min(best, sum(costs))
    return best + sum(place.opening_s for place in places)


TO_PLACE = CallToPlace(call_of("prefix"), OUTPUT_TOKENS, inf)
NO_OFFER = offer(TO_PLACE, situation(Engine()), situation(Engine()).engines[0])
PLACES = st.builds(Place, st.just(NO_OFFER), st.floats(0, 10), st.floats(0, 10), st.floats(0.1, 5))


@given(places=st.lists(PLACES, min_size=1, max_size=3), calls=st.integers(1, 6))
def test_the_least_sum_is_that_of_a_search(places: list[Place], calls: int) -> None:
    found, expected = least_sum_s(places, calls), searched(places, calls)
    most_growth_s = max(place.growth_s for place in places)
    assert found <= expected + 1e-9
    assert found == pytest.approx(expected, abs=len(places) * most_growth_s / PARTS**2)


@given(places=st.lists(PLACES, min_size=1, max_size=6), calls=st.integers(1, 40))
def test_an_engine_is_used_only_if_that_saves_a_tenth(places: list[Place], calls: int) -> None:
    count = len(used(places, calls))
    sums_s = [least_sum_s(places[: number + 1], calls) for number in range(len(places))]
    assert count == 1 or sums_s[count - 1] <= WORTH * sums_s[0]
    assert all(sum_s > WORTH * sums_s[count - 1] for sum_s in sums_s[count:])


def test_a_ttft_comes_before_the_group() -> None:
    fleet = situation(Engine("prefix", contexts=(100,) * 9), Engine())._replace(siblings=15)
    call = call_of("prefix")._replace(slo=Slo(ttft_s=0.05))
    assert least_delay(call, fleet).engine_id == least_delay(call, fleet._replace(siblings=0)).engine_id
