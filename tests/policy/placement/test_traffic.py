"""The expected length of an answer."""

from __future__ import annotations

import pytest

from plait.policy.placement.traffic import PRIOR_CALLS, Traffic


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
