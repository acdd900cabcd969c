"""A prefix's end is found, and quickly where it was expected."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.adapter.prefix_search import cached_blocks


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
