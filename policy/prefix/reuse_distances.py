"""How large a cache would have had to be to have the blocks that prompts used again: LRU stack distances, by sampling.

A block's distance counts the tokens of all distinct blocks that an LRU cache evicts after the block, and its own: each
cache of at least so many tokens would have had it. A prompt uses all its blocks at once, the first as the latest,
because engines evict a prompt from its end. So a block stays as long as any that follows it in a prompt, and what a
cache has of a prompt is always its beginning.

Blocks are sampled as in SHARDS (Waldspurger et al., FAST 2015). One of `one_of` is followed, by its hash, and stands
for so many. The blocks of the own prompt need no sample: the block's index says how many come before it.

The blocks that a cache would have lacked are counted, and the rest of all blocks are its hits (SHARDS-adj). A system
prompt of thirty blocks may have no followed block, or two, and yet be most of what is used. Whatever a cache lacks is
spread over many blocks, so the sample tells its number well.

The rate is fixed, and the blocks that were used longest ago are dropped. A rate that adapts would be finer for the
first half a billion tokens only, after which it would have come down to this one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Final

BOUNDS_TOKENS: Final = tuple(8_000 << doublings for doublings in range(17))
"""Sizes of caches: from less than an engine has to 524 million tokens, 64 TiB of Mistral 7B's."""

ONE_OF: Final = 256
"""A prompt of 1,000 blocks has four followed ones and takes 10 us (docs/measurements/prefix-tree.md)."""

DROPPED: Final = 512
"""So many followed blocks are dropped at once: each time, both lists are moved."""

MOST_FOLLOWED: Final = BOUNDS_TOKENS[-1] // (64 * ONE_OF) + 2 * DROPPED
"""They reach beyond the last bound, with blocks of the least size. About 5 MB."""


class ReuseDistances:
    """The distances of one model's prompts. Of the followed blocks at most `most_followed` are remembered.

    `one_of` is a power of two, at most 256. With 1, all blocks are followed and all figures are exact.
    """

    __slots__ = (
        "_block_tokens", "_blocks", "_clock", "_counts", "_last", "_marks", "_most", "_one_of", "_stamps",
        "_used_blocks", "_within",
    )  # fmt: skip

    def __init__(self, block_tokens: int, *, one_of: int = ONE_OF, most_followed: int = MOST_FOLLOWED) -> None:
        self._block_tokens = block_tokens
        self._one_of = one_of
        self._most = most_followed
        # Makes 0 of the lowest byte of each followed hash. Of 256 only those with the byte 0 are followed as they are.
        self._marks = None if one_of == 256 else bytes(low % one_of for low in range(256))
        self._last: dict[int, int] = {}  # when each followed block was used last
        self._stamps: list[int] = []  # these times, ascending
        self._blocks: list[int] = []  # whose they are
        self._clock = 0
        self._used_blocks = 0
        self._counts = [0] * (len(BOUNDS_TOKENS) + 1)  # distances up to each bound that are beyond the one before
        self._within = [0] * len(BOUNDS_TOKENS)

    def used(self, hashes: Sequence[int]) -> Sequence[float]:
        """A prompt with these chained hashes was used. Returns the distances in tokens of its followed blocks.

        A distance is infinite if the block is new, or was dropped.
        """
        self._used_blocks += len(hashes)
        whole = hashes if isinstance(hashes, array) else array("Q", hashes)
        marks = whole.tobytes()[::8].translate(self._marks)  # of each hash its lowest byte (little endian)
        index = marks.find(0)
        return self._follow(whole, marks, index) if index >= 0 else ()

    def _follow(self, hashes: array[int], marks: bytes, index: int) -> list[float]:
        """Count the distances of the followed blocks, and make these blocks the latest."""
        last, stamps, blocks = self._last, self._stamps, self._blocks
        followed, distances = list[int](), list[float]()
        while index >= 0:
            block = hashes[index]
            followed.append(block)
            distance, stamp = inf, last.get(block)
            if stamp is not None:
                place = bisect_left(stamps, stamp)
                del stamps[place], blocks[place]
                later = len(stamps) - place  # without those of this prompt, which have left their places
                distance = (later * self._one_of + index + 1) * self._block_tokens
            distances.append(distance)
            self._counts[bisect_left(BOUNDS_TOKENS, distance)] += 1
            index = marks.find(0, index + 1)
        followed.reverse()
        end = self._clock + len(followed)
        times = range(self._clock, end)
        last.update(zip(followed, times, strict=True))
        stamps += times
        blocks += followed
        self._clock = end
        if len(blocks) > self._most:
            self._drop()
        return distances

    def _drop(self) -> None:
        """Forget the blocks that were used longest ago."""
        surplus = max(len(self._blocks) - self._most, min(DROPPED, self._most // 2))
        for block in self._blocks[:surplus]:
            del self._last[block]
        del self._blocks[:surplus], self._stamps[:surplus]

    def within_tokens(self) -> list[int]:
        """How many of the used tokens a cache of each of `BOUNDS_TOKENS` would have had, and then all used tokens.

        No figure ever falls: one waits where the sample has more missing blocks than a fair one.
        """
        used_tokens, weight = self._used_blocks * self._block_tokens, self._one_of * self._block_tokens
        missing = list(accumulate(reversed(self._counts)))[-2::-1]
        now = (used_tokens - blocks * weight for blocks in missing)
        self._within = [*map(max, self._within, now)]
        return [*self._within, used_tokens]

    def check(self) -> None:
        """Assert that the state is consistent; for tests."""
        assert len(self._last) == len(self._blocks) <= self._most
        assert [self._last[block] for block in self._blocks] == self._stamps == sorted(self._stamps)
