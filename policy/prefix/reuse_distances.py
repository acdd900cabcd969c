"""How large a cache has to be to hit the blocks that prompts use again: LRU stack distances of a sample of blocks.

In: the block hashes of each prompt (`used`). Out: by cache size, the tokens that would have been hits
(`within_tokens`).

The distance of a reused block is the size of the smallest LRU cache that still has the block: the tokens of the
distinct blocks used since, and its own. A prompt uses all its blocks at once, the first as the latest, because engines
evict a prompt from its end. So what a cache has of a prompt is always a prefix.

Sampling is that of SHARDS (Waldspurger et al., FAST 2015): one block of `one_of`, chosen by its hash, is followed and
stands for `one_of` blocks. Within its own prompt, a block's index tells exactly how many blocks come before it.

Misses are counted, and hits are all uses less the misses (SHARDS-adj). Hits concentrate on few hot blocks, of which a
sample may have none: a system prompt of thirty blocks has no followed block, or two. Misses are spread over many
blocks, so a sample counts them well.

The rate is fixed, and the least recently used of the followed blocks are dropped. An adaptive rate would be finer only
for the first half a billion tokens, and would then be as low as this one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Final

BOUNDS_TOKENS: Final = tuple(8_000 << doublings for doublings in range(17))
"""Sizes of caches: from less than an engine has up to 524 million tokens, which is 64 TiB for Mistral 7B."""

ONE_OF: Final = 256
"""A prompt of 1,000 blocks has four followed ones and takes 10 us (docs/measurements/prefix-tree.md)."""

DROPPED: Final = 512
"""How many followed blocks are dropped at once: each drop moves both lists."""

MOST_FOLLOWED: Final = BOUNDS_TOKENS[-1] // (64 * ONE_OF) + 2 * DROPPED
"""Enough to reach the last bound with the smallest blocks. About 5 MB."""


class ReuseDistances:
    """The distances of one model's prompts. At most `most_followed` blocks are remembered.

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
        # A table for `bytes.translate`: the lowest byte of each followed hash becomes 0. With 256 no table is needed.
        self._marks = None if one_of == 256 else bytes(low % one_of for low in range(256))
        self._last: dict[int, int] = {}  # by followed block, the stamp of its last use
        self._stamps: list[int] = []  # these stamps, ascending
        self._blocks: list[int] = []  # the block of each stamp
        self._clock = 0
        self._used_blocks = 0
        self._counts = [0] * (len(BOUNDS_TOKENS) + 1)  # a histogram of distances, with a last bin beyond all bounds
        self._within = [0] * len(BOUNDS_TOKENS)

    def used(self, hashes: Sequence[int]) -> Sequence[float]:
        """A prompt with these chained hashes was used. Returns the distances in tokens of its followed blocks.

        The distance of a block that is new or was dropped is infinite.
        """
        self._used_blocks += len(hashes)
        whole = hashes if isinstance(hashes, array) else array("Q", hashes)
        marks = whole.tobytes()[::8].translate(self._marks)  # the lowest byte of each hash (little endian)
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
                later = len(stamps) - place  # this prompt's earlier blocks are deleted already; `index` counts them
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
        surplus = max(len(self._blocks) - self._most, min(DROPPED, self._most // 2))
        for block in self._blocks[:surplus]:
            del self._last[block]
        del self._blocks[:surplus], self._stamps[:surplus]

    def within_tokens(self) -> list[int]:
        """The tokens that would have been hits in a cache of each size in `BOUNDS_TOKENS`, then all used tokens.

        The figures are counters, so they never fall: where the sample overestimates misses, a figure stays for a while.
        """
        used_tokens, weight = self._used_blocks * self._block_tokens, self._one_of * self._block_tokens
        missing = list(accumulate(reversed(self._counts)))[-2::-1]
        now = (used_tokens - blocks * weight for blocks in missing)
        self._within = [*map(max, self._within, now)]
        return [*self._within, used_tokens]
