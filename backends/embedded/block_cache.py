"""The embedded engine's KV cache: reference-counted blocks, found by chained hash, evicted in LRU order.

A block that no call uses keeps its content until it is evicted. Calls release their last block first. So eviction takes
a prefix from its end (leaf first), as in vLLM. Each hash has one block: a call that computes the same content again
switches to the existing block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockCache:
    """`total_blocks` blocks, numbered from 0; `on_evict` gets the hash of each evicted block."""

    def __init__(self, total_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.total_blocks = total_blocks
        self.cached_blocks = 0
        """Blocks that hold a prefix and that no call uses."""
        self._on_evict = on_evict
        self._references = [0] * total_blocks
        self._hashes: list[int | None] = [None] * total_blocks
        self._by_hash: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total_blocks))

    @property
    def free_blocks(self) -> int:
        """Blocks that no call uses, including cached ones. All of them can be allocated."""
        return len(self._free)

    def match(self, hashes: Sequence[int], most: int | None = None, guess: int = 0) -> int:
        """How many of a chain's leading blocks, `most` at most, are cached.

        Eviction takes leaves first, so a bisection finds the number. If it is still `guess`, two look-ups suffice.
        """
        by_hash = self._by_hash
        low, high = 0, len(hashes)
        if most is not None and most < high:
            high = most
        if guess <= high and (not guess or hashes[guess - 1] in by_hash):
            if guess == high or hashes[guess] not in by_hash:
                return guess
            low = guess + 1
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in by_hash:
                low = middle + 1
            else:
                high = middle
        return low

    def idle(self, hashes: Sequence[int], most: int) -> int:
        """How many of a chain's first `most` blocks no call uses. All must be cached. Acquiring them takes that many.

        A call that uses a block uses all blocks before it. So a bisection finds the first block that no call uses.
        """
        references, by_hash = self._references, self._by_hash
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            if references[by_hash[hashes[middle]]]:
                low = middle + 1
            else:
                high = middle
        return most - low

    def exclusive(self, blocks: Sequence[int]) -> int:
        """How many of these blocks only one call uses, so that its release frees them."""
        return sum(self._references[block] == 1 for block in blocks)

    def acquire(self, hashes: Sequence[int]) -> list[int]:
        """Use the cached blocks of a matched chain."""
        blocks = [self._by_hash[block_hash] for block_hash in hashes]
        for block in blocks:
            self._use(block)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Use `count` blocks without content. Evicts in LRU order. The caller has checked `free_blocks`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            evicted = self._hashes[block]
            if evicted is not None:
                self._hashes[block] = None
                del self._by_hash[evicted]
                self.cached_blocks -= 1
                self._on_evict(evicted)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, block_hash: int) -> int:
        """`block` now holds this prefix. Returns the block to use from now on: an older one with it, if any."""
        existing = self._by_hash.get(block_hash)
        if existing is None:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block
            return block
        if existing != block:
            self._use(existing)
            self.release([block])
        return existing

    def release(self, blocks: Sequence[int]) -> None:
        """A call no longer uses these blocks. They are in prompt order."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)  # it holds nothing, so it is allocated first
                else:
                    self.cached_blocks += 1

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert all(count >= 0 for count in self._references)
        assert set(self._free) == {block for block, count in enumerate(self._references) if count == 0}
        assert self._by_hash == {h: block for block, h in enumerate(self._hashes) if h is not None}
        assert self.cached_blocks == sum(self._hashes[block] is not None for block in self._free)

    def _use(self, block: int) -> None:
        if self._references[block] == 0:
            del self._free[block]
            self.cached_blocks -= 1
        self._references[block] += 1
