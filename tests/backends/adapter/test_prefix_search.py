"""The end of a cached prefix is found, and quickly where it was expected. So is that of a common prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.adapter.prefix_search import cached_blocks, shared_blocks


@given(most=st.integers(0, 70), cached=st.integers(0, 80), guess=st.integers(0, 80))
def test_the_prefix_is_found_whatever_was_guessed(most: int, cached: int, guess: int) -> None:
    asked: list[int] = []

    def is_cached(index: int) -> bool:
        asked.append(index)
        return index < cached

    assert cached_blocks(most, guess, is_cached) == min(most, cached)
    assert all(0 <= index < most for index in asked)
    assert len(asked) <= 9


def test_a_good_guess_is_asked_for_twice() -> None:
    asked: list[int] = []

    def is_cached(index: int) -> bool:
        asked.append(index)
        return index < 40

    assert cached_blocks(1000, 40, is_cached) == 40
    assert asked == [39, 40]


@given(shared=st.integers(0, 40), own=st.integers(0, 40), others=st.integers(0, 40), most=st.integers(0, 80))
def test_the_end_of_a_common_prefix_is_found(shared: int, own: int, others: int, most: int) -> None:
    first = [*range(shared), *range(1000, 1000 + own)]
    second = [*range(shared), *range(2000, 2000 + others)]
    limit = min(most, len(first), len(second))
    assert shared_blocks(first, second, limit) == min(limit, shared)
