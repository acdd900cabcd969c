"""Finds by bisection how many blocks a prompt shares with a cache, or with another prompt.

Bisection works because caches evict a prefix from its end, and a block's hash depends on all blocks before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence


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


def shared_blocks(own: Sequence[Hashable], others: Sequence[Hashable], most: int) -> int:
    """How many of the first `most` blocks two prompts share. Each has at least `most` chained hashes."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if own[middle] == others[middle]:
            low = middle + 1
        else:
            high = middle
    return low
