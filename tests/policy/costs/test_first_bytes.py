"""The pace at which an engine really comes to first bytes, by hand and by a second implementation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.engine_view import RECENT, FirstBytes


def gap_s(*calls: tuple[float, float]) -> float:
    """The mean after calls that were sent and had their first bytes at these times."""
    first_bytes = FirstBytes()
    for sent_s, now_s in calls:
        first_bytes.came(sent_s, now_s)
    return first_bytes.gap_s


def test_before_the_first_one_nothing_is_known() -> None:
    assert gap_s() == 0.0


def test_the_first_gap_is_taken_as_it_is() -> None:
    assert gap_s((2.0, 2.5)) == 0.5


def test_a_call_that_waited_behind_another_counts_from_that_ones_first_byte() -> None:
    assert gap_s((0.0, 0.5), (0.0, 0.7)) == pytest.approx(0.9 * 0.5 + 0.1 * 0.2)


def test_time_in_which_no_call_waits_does_not_count() -> None:
    assert gap_s((0.0, 0.5), (100.0, 100.2)) == pytest.approx(0.9 * 0.5 + 0.1 * 0.2)


def test_first_bytes_of_one_iteration_come_with_no_gap_between_them() -> None:
    assert gap_s((0.0, 0.4), (0.0, 0.4), (0.0, 0.4)) == pytest.approx(0.9 * 0.9 * 0.4)
    assert gap_s((0.3, 0.3), (0.3, 0.8)) == pytest.approx(0.5), "a first gap of 0 is not known yet"


def test_a_steady_engine_is_known_after_some_tens_of_first_bytes() -> None:
    slow_then_fast = [(0.0, 1.0), *((0.0, 1.0 + 0.01 * number) for number in range(1, 101))]
    assert gap_s(*slow_then_fast) == pytest.approx(0.01, rel=0.01)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 5)), min_size=1, max_size=30))
def test_the_mean_weighs_each_gap_less_the_older_it_is(calls: list[tuple[float, float]]) -> None:
    """Each call has its first byte some seconds after the one before it, and was sent some seconds before that."""
    now_s, times, gaps = 10.0, list[tuple[float, float]](), list[float]()
    for after_s, waited_s in calls:
        now_s += after_s
        gap = min(now_s - since_s for since_s in (now_s - waited_s, *(before_s for _, before_s in times[-1:])))
        gaps = [*gaps, gap] if any(gaps) else [gap]
        times.append((now_s - waited_s, now_s))
    weights = [RECENT * (1 - RECENT) ** age for age in reversed(range(len(gaps)))]
    weights[0] /= RECENT
    assert gap_s(*times) == pytest.approx(sum(map(float.__mul__, weights, gaps)), abs=1e-9)
