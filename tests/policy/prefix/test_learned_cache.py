"""What answers tell of an estimated cache: where hits end, and how large it is."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.prefix.learned_cache import ALL, LearnedCache, Reach

SIZE = 1_000


def whole(blocks: int) -> Reach:
    """A reach that ends where a hit has ended."""
    return Reach(blocks, blocks, blocks, blocks)


_times = count()


def tell(learned: LearnedCache, reach: Reach, found: float, times: int = 1) -> None:
    """Each call is placed after the answer before."""
    for _ in range(times):
        now_s = next(_times)
        learned.saw(reach, found, SIZE, now_s, now_s)


def test_right_estimates_stay_as_they_are() -> None:
    learned = LearnedCache()
    tell(learned, whole(30), 30, 50)
    tell(learned, Reach(30, 0, 0, 40), 29, 50)
    assert learned.is_sure
    assert learned.fraction == 1.0
    assert learned.expected(Reach(40, 20, 10, 50)) == 40


def test_single_exceptions_change_no_prediction() -> None:
    learned = LearnedCache()
    tell(learned, whole(30), 30, 20)
    tell(learned, whole(30), 0)
    assert learned.is_sure


def test_nothing_is_expected_where_nothing_was_found() -> None:
    learned = LearnedCache()
    tell(learned, Reach(30, 30, 0, 30), 0, 4)
    assert learned.expected(Reach(30, 30, 0, 30)) < 10
    tell(learned, Reach(30, 0, 0, 30), 0, 4)
    assert learned.finds_nothing
    assert learned.expected(Reach(40, 30, 20, 40)) == 0
    assert learned.fraction == 1.0, "no hit has ended there, so it is no question of size"


def test_one_hit_shows_that_caching_is_on() -> None:
    learned = LearnedCache()
    tell(learned, Reach(30, 30, 0, 30), 0, 20)
    tell(learned, Reach(30, 0, 0, 30), 30)
    assert not learned.finds_nothing
    assert learned.expected(Reach(40, 30, 20, 40)) > 20


def test_hits_at_seams_only() -> None:
    learned = LearnedCache()
    tell(learned, Reach(30, 20, 20, 30), 20, 20)
    assert learned.expected(Reach(30, 20, 20, 30)) == 20
    assert learned.expected(Reach(30, 25, 20, 30)) == 25


def test_the_size_falls_where_hits_end_no_more_and_rises_where_they_end_again() -> None:
    learned = LearnedCache()
    tell(learned, whole(30), 0, 3)
    assert learned.fraction == 1 / 8
    tell(learned, whole(0), 30, 2)
    assert 1 / 8 < learned.fraction < 1
    tell(learned, whole(0), 30, 9)
    assert learned.fraction == 1.0, "the engine has said so"


def test_a_size_that_nobody_said_may_rise_beyond() -> None:
    learned = LearnedCache()
    for number in range(3):
        learned.saw(whole(0), 30, SIZE, number, number, is_bound=False)
    assert learned.fraction > 2


def test_the_calls_of_one_moment_count_once() -> None:
    learned = LearnedCache()
    for _ in range(8):
        learned.saw(whole(30), 0, SIZE, 1.0, 2.0)
    assert learned.fraction == 1 / 2


def test_what_was_found_fits() -> None:
    learned = LearnedCache()
    tell(learned, whole(30), 0, 60)
    assert learned.fraction < 1e-6
    tell(learned, whole(0), 500)
    assert learned.fraction >= 0.5


@pytest.mark.parametrize("seed", range(3))
def test_a_share_is_the_mean_of_what_is_found(seed: int) -> None:
    learned, rng = LearnedCache(), random.Random(seed)
    expected = 0.0
    for number in range(400):
        expected += learned.expected(whole(30)) / 400
        learned.saw(whole(30), 30 * (rng.random() < 0.6), SIZE, number, number)
    assert expected == pytest.approx(0.6 / ALL * 30, rel=0.1)


@given(
    st.lists(st.tuples(st.tuples(*[st.integers(0, 60)] * 4).map(sorted), st.floats(0, 100), st.booleans()), max_size=40)
)
def test_predictions_are_within_what_the_estimate_reaches(answers: list[tuple[list[int], float, bool]]) -> None:
    learned = LearnedCache()
    for number, (blocks, found, is_bound) in enumerate(answers):
        reach = Reach(blocks[2], blocks[1], blocks[0], blocks[3])
        assert 0 <= learned.expected(reach) <= reach.anywhere
        learned.saw(reach, found, SIZE, number, number, is_bound=is_bound)
        assert learned.fraction > 0
        assert all(0 <= share <= 1 for share in learned.shares)
        assert not learned.is_sure or learned.expected(reach) == reach.anywhere
