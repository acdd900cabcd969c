"""Finds the end of a prompt's cached prefix by bisection. Caches evict a prefix from its end, so bisection works."""

from __future__ import annotations

from collections.abc import Callable


def cached_blocks(most: int, guess: int, is_cached: Callable[[int], bool]) -> int:
    """How many of a prompt's first `most` blocks are cached. The search tries `guess` first.

    `is_cached` takes a block's index. If a block is cached, all blocks before it are cached.
    """
    low, high = 0, most
    for end in (guess, guess + 1):
        if low < end <= high:
            low, high = (end, high) if is_cached(end - 1) else (low, end - 1)
    while low < high:
        end = (low + high + 1) // 2
        low, high = (end, high) if is_cached(end - 1) else (low, end - 1)
    return low
