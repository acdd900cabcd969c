"""Where a prompt's cached prefix ends, found by asking for few of its blocks: caches evict a prefix from its end."""

from __future__ import annotations

from collections.abc import Callable


def cached_blocks(most: int, guess: int, is_cached: Callable[[int], bool]) -> int:
    """How many of a prompt's first `most` blocks are cached; where `guess` of them end is looked at first.

    `is_cached` is asked for a block's index, and true for every block before one that it is true for.
    """
    low, high = 0, most
    for end in (guess, guess + 1):
        if low < end <= high:
            low, high = (end, high) if is_cached(end - 1) else (low, end - 1)
    while low < high:
        end = (low + high + 1) // 2
        low, high = (end, high) if is_cached(end - 1) else (low, end - 1)
    return low
