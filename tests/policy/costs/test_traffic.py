"""The expected length of an answer."""

from __future__ import annotations

import pytest

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.load import LoadLedger
from plait.policy.costs.situation import PRIOR_CALLS, Arrivals, Traffic
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency


def engines(*token_s: float) -> list[EngineView]:
    """Engines that take so many seconds for a token."""
    tree, costs = (
        PrefixTree(),
        [CostModel(PiecewiseLinear(((0, 0.010),), one), 0, 0, 0, LongAttention()) for one in token_s],
    )
    return [EngineView(f"{at}", one, LoadLedger(one), Residency(f"{at}", tree)) for at, one in enumerate(costs)]


ONE = engines(0.001)


def test_the_prior_gives_way_to_what_was_seen() -> None:
    traffic = Traffic(60.0, 128)
    assert traffic.expected_output_tokens(None) == 128
    for number in range(4):
        traffic.ended(8, float(number) / 1000)
    assert traffic.expected_output_tokens(None) == pytest.approx((128 + 8) / 2, rel=1e-3)
    for _ in range(1000):
        traffic.ended(8, 1.0)
    assert traffic.expected_output_tokens(None) == pytest.approx(8, abs=1)


def test_a_limit_bounds_the_expectation() -> None:
    assert [Traffic(60.0, 128).expected_output_tokens(limit) for limit in (1, 128, 500)] == [1, 128, 128]


def test_answers_are_forgotten_over_the_window() -> None:
    traffic = Traffic(60.0, 0)
    for _ in range(100):
        traffic.ended(1000, 0.0)
    for _ in range(100):
        traffic.ended(10, 600.0)
    assert traffic.expected_output_tokens(None) == pytest.approx(10 * 100 / (100 + PRIOR_CALLS), rel=0.01)


def test_arrivals_are_counted_by_the_second() -> None:
    arrivals = Arrivals(0.0)
    for number in range(1, 6001):
        arrivals.came(100 + number % 2, number / 10)
    assert arrivals.coming(ONE, 600.0).rate_s == pytest.approx(10.0, rel=0.01)
    assert arrivals.coming(ONE, 660.0).rate_s == pytest.approx(10.0 / 2.718, rel=0.01)
    assert arrivals.coming(4 * ONE, 600.0) == pytest.approx((2.5, 100.5, 1000.0), rel=0.01)


def test_the_speed_is_that_of_the_engines_that_are_asked() -> None:
    arrivals, fleet, slow = Arrivals(0.0), engines(0.001, 0.001, 0.000_25), engines(0.001, 0.001, 0.001)
    arrivals.came(100, 1.0)
    assert arrivals.coming(fleet, 1.0).tokens_per_s == pytest.approx(2000.0)
    assert arrivals.coming(slow, 1.0).tokens_per_s == pytest.approx(1000.0), "other engines, as many"
    fleet[2].slowness = 4.0
    assert arrivals.coming(fleet, 1.0).tokens_per_s == pytest.approx(2000.0), "as its profile says"


@pytest.mark.parametrize(("seconds", "rate_s"), [(1.0, 10.0), (10.0, 10.0), (0.1, 1.0)])
def test_the_first_arrivals_count_over_their_own_time(seconds: float, rate_s: float) -> None:
    arrivals = Arrivals(0.0)
    calls = round(10 * seconds)
    for number in range(1, calls + 1):
        arrivals.came(1, seconds * number / calls)
    assert arrivals.coming(ONE, seconds).rate_s == pytest.approx(rate_s, rel=0.1)
