"""How fast an engine is against the fleet, from what was observed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.pace import MOST, TRUSTED, EnginePace, FleetPace


def fleet(engines: int) -> list[EnginePace]:
    shared = FleetPace()
    return [EnginePace(shared) for _ in range(engines)]


def run(paces: list[EnginePace], times: list[float], seconds: int) -> None:
    for second in range(seconds):
        for pace, taken_s in zip(paces, times, strict=True):
            pace.observe(taken_s, 1.0, float(second))


def test_an_engine_that_takes_three_times_as_long_is_seen_within_seconds() -> None:
    paces = fleet(4)
    run(paces, [3.0, 1.0, 1.0, 1.0], 5)
    slow, *others = [pace.slowness(5.0) for pace in paces]
    assert slow == pytest.approx(2.6, rel=0.05), "one predicted second of five counts as usual"
    assert others == [1.0] * 3


def test_a_profile_that_is_wrong_for_all_changes_nothing() -> None:
    """Not even for an engine of which nothing is known."""
    paces = fleet(3)
    run(paces[:2], [0.05, 0.05], 20)
    assert [pace.slowness(20.0) for pace in paces] == [1.0] * 3


def test_an_engine_of_which_nothing_is_known_is_taken_for_the_fastest() -> None:
    paces = fleet(4)
    run(paces[:3], [0.25, 1.0, 1.0], 20)
    assert [pace.slowness(20.0) for pace in paces] == [0.25, 1.0, 1.0, 0.25]
    paces[3].observe(4.0, 4.0, 20.0)
    assert paces[3].slowness(20.0) == 1.0, "it had calls, and is known"


def test_what_load_explains_changes_nothing() -> None:
    paces = fleet(2)
    run(paces, [1.6, 1.0], 100)
    assert [pace.slowness(100.0) for pace in paces] == [1.0, 1.0]


def test_an_engine_that_gets_no_calls_is_tried_again() -> None:
    paces = fleet(4)
    run(paces, [5.0, 1.0, 1.0, 1.0], 10)
    for second in range(10, 150):
        for pace in paces[1:]:
            pace.observe(1.0, 1.0, float(second))
    assert [paces[0].slowness(now_s) > 1 for now_s in (10.0, 30.0, 150.0)] == [True, True, False]


def test_one_short_call_is_no_evidence() -> None:
    pace = EnginePace()
    pace.observe(0.5, 0.1, 0.0)
    assert pace.slowness(0.0) == 1.0


def test_a_fast_engine_with_most_calls_is_not_the_measure_of_itself() -> None:
    paces = fleet(4)
    for second in range(30):
        paces[0].observe(4.0, 8.0, float(second))
        for pace in paces[1:]:
            pace.observe(1.0, 1.0, float(second))
    assert [pace.slowness(30.0) for pace in paces] == [pytest.approx(0.5, rel=0.05), 1.0, 1.0, 1.0]


def test_an_engine_that_leaves_is_no_measure() -> None:
    paces = fleet(3)
    run(paces, [9.0, 9.0, 1.0], 20)
    assert paces[2].slowness(20.0) < 1
    for pace in paces[:2]:
        pace.leave()
    assert paces[2].slowness(20.1) == 1.0


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 100), st.floats(0, 100), st.floats(0, 50)), max_size=30))
def test_the_slowness_is_bounded(observations: list[tuple[int, float, float, float]]) -> None:
    paces, now_s = fleet(3), 0.0
    for which, observed_s, predicted_s, passed_s in observations:
        now_s += passed_s
        paces[which].observe(observed_s, predicted_s, now_s)
        for pace in paces:
            slowness = pace.slowness(now_s)
            assert slowness == 1.0 or TRUSTED < slowness <= MOST or 1 / MOST <= slowness < 1 / TRUSTED
