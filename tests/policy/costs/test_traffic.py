"""The expected length of an answer."""

from __future__ import annotations

import pytest

from plait.policy.costs.situation import PRIOR_CALLS, Arrivals, Traffic


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
    assert arrivals.coming(1, 600.0).rate_s == pytest.approx(10.0, rel=0.01)
    assert arrivals.coming(1, 660.0).rate_s == pytest.approx(10.0 / 2.718, rel=0.01)
    assert arrivals.coming(4, 600.0) == pytest.approx((2.5, 100.5), rel=0.01)


@pytest.mark.parametrize(("seconds", "rate_s"), [(1.0, 10.0), (10.0, 10.0), (0.1, 1.0)])
def test_the_first_arrivals_count_over_their_own_time(seconds: float, rate_s: float) -> None:
    arrivals = Arrivals(0.0)
    calls = round(10 * seconds)
    for number in range(1, calls + 1):
        arrivals.came(1, seconds * number / calls)
    assert arrivals.coming(1, seconds).rate_s == pytest.approx(rate_s, rel=0.1)
