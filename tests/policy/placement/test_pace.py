"""How fast an engine is, from what was observed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.placement.pace import MOST, TRUSTED, Pace


def test_an_engine_that_takes_three_times_as_long_is_seen_within_seconds() -> None:
    pace = Pace()
    for second in range(5):
        pace.observe(3.0, 1.0, float(second))
    assert pace.factor(5.0) == pytest.approx(3.0, rel=0.2)
    assert repr(pace).startswith("Pace(2.")


def test_what_load_explains_changes_nothing() -> None:
    pace = Pace()
    for second in range(100):
        pace.observe(1.4, 1.0, float(second))
    assert pace.factor(100.0) == 1.0


def test_an_engine_that_gets_no_calls_is_tried_again() -> None:
    pace = Pace()
    for second in range(10):
        pace.observe(3.0, 1.0, float(second))
    assert [pace.factor(now_s) > 1 for now_s in (10.0, 30.0, 90.0)] == [True, True, False]


def test_one_short_call_is_no_evidence() -> None:
    pace = Pace()
    pace.observe(0.5, 0.1, 0.0)
    assert pace.factor(0.0) == 1.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.floats(0, 50)), max_size=30))
def test_the_factor_is_bounded(observations: list[tuple[float, float, float]]) -> None:
    pace, now_s = Pace(), 0.0
    for observed_s, predicted_s, passed_s in observations:
        now_s += passed_s
        pace.observe(observed_s, predicted_s, now_s)
        factor = pace.factor(now_s)
        assert factor == 1.0 or TRUSTED < factor <= MOST or 1 / MOST <= factor < 1 / TRUSTED
