"""Tree blocks on the accelerator and in host memory together, so that each is reported in its fastest tier.

vLLM offloads chunks: one or several consecutive engine blocks of a prompt, named by the key of the last one. Only when
the accelerator caches a block does vLLM show which tokens it has, and so which tree block it belongs to. This is kept
while a tier has the block, and until its transfer to host memory has ended: vLLM may evict a block whose transfer has
begun, and begins the last transfers of a request one step after the request's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.tree_block_tiers import TreeBlockTiers
from plait.backends.vllm.tree_blocks import TreeBlocks


class TieredBlocks:
    """A `TreeBlocks` for two tiers. A chunk has `chunk_blocks` engine blocks.

    A tree block is on the accelerator if all of its engine blocks are. Any other tree block is in host memory, and in
    the journal `host`, if host memory has each of its engine blocks that the accelerator lacks: vLLM loads these engine
    blocks.
    """

    def __init__(self, journal: CacheJournal, chunk_blocks: int) -> None:
        self.host: Final = CacheJournal(changes=journal.changes)
        tiers = TreeBlockTiers(journal, self.host)
        self._device = TreeBlocks(tiers)
        self._either = TreeBlocks(tiers, 1)
        """What the two tiers have together counts as in host memory, unless the accelerator has all of it."""
        self.copies = self._device.copies
        """Copies of each engine block on the accelerator, by key."""
        self._chunk_blocks = chunk_blocks
        self._parts: dict[bytes, tuple[bytes, ...]] = {}
        """The engine blocks of each chunk that a tier has, by its last one. Empty if a chunk is one engine block."""
        self._offloaded: dict[bytes, Sequence[bytes]] = {}
        """The engine blocks of each chunk in host memory; an empty sequence while they are not known."""
        self._under_way: dict[bytes, Sequence[bytes]] = {}
        """As `_offloaded`, for chunks on their way to host memory."""
        self._lost: dict[bytes, list[tuple[int, int | None, list[bytes]]]] = {}
        """The arguments of `composed` for engine blocks that no tier has, while a transfer may still bring them."""

    # The accelerator's blocks.

    def inserted(self, key: bytes) -> None:
        self._device.inserted(key)
        self._either.inserted(key)

    def removed(self, key: bytes) -> None:
        self._left(key)
        self._device.removed(key)

    def composed(self, tree_block: int, parent: int | None, keys: Sequence[bytes]) -> None:
        """As `TreeBlocks.composed`."""
        self._device.composed(tree_block, parent, keys)
        self._either.composed(tree_block, parent, keys)

    def tree_block(self, last_key: bytes) -> int | None:
        """As `TreeBlocks.tree_block`."""
        return self._either.tree_block(last_key)

    def clear(self) -> None:
        """The accelerator's cache has been emptied."""
        for key, copies in self._device.copies.items():
            for _ in range(copies):
                self._left(key)
        self._device.clear()

    def chunked(self, blocks: Sequence[Any], first: int, end: int) -> None:
        """A request's `blocks[first:end]` were cached. Learn the engine blocks of each chunk that ends among them."""
        width = self._chunk_blocks
        if width == 1:
            return
        for index in range(first // width, end // width):
            parts = tuple(block.block_hash for block in blocks[index * width : (index + 1) * width])
            if None in parts or parts[-1] in self._parts:
                continue
            self._parts[parts[-1]] = parts
            if self._offloaded.get(parts[-1]) == ():  # stored before its engine blocks were known
                self._arrived(parts[-1], parts)

    # Host memory's chunks, by the keys of their last engine blocks.

    def storing(self, keys: Iterable[bytes]) -> None:
        """The transfer of chunks to host memory begins."""
        self._under_way.update((key, self._parts_of(key)) for key in keys)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Host memory has chunks whose transfer has ended. No effect on chunks whose transfer has not begun."""
        for key in keys:
            if key in self._under_way:
                self._arrived(key, self._under_way.pop(key) or self._parts_of(key))

    def failed(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._under_way.pop(key, None)

    def dropped(self, keys: Iterable[bytes]) -> None:
        """Host memory has evicted chunks."""
        for key in keys:
            for part in self._offloaded.pop(key, ()):
                self._left(part)

    def dropped_all(self) -> None:
        """Host memory was emptied, and the transfers under way are void."""
        self._under_way.clear()
        self.dropped(list(self._offloaded))

    def end_step(self) -> None:
        """A step is scheduled, and its transfers have begun. Forget lost blocks that no transfer will bring."""
        if not self._lost:
            return
        needed = {part for parts in self._under_way.values() for part in parts}
        for key in [key for key in self._lost if key not in needed]:
            del self._lost[key]
            if key not in self._either.copies:
                self._parts.pop(key, None)

    def _parts_of(self, key: bytes) -> Sequence[bytes]:
        return (key,) if self._chunk_blocks == 1 else self._parts.get(key, ())

    def _arrived(self, key: bytes, parts: Sequence[bytes]) -> None:
        self._offloaded[key] = parts
        for part in parts:
            self._either.inserted(part)
        for part in parts:
            for name in self._lost.get(part, ()):
                self._either.composed(*name)

    def _left(self, key: bytes) -> None:
        """One of the tiers has lost a copy of an engine block."""
        if self._either.copies[key] == 1:
            self._lost[key] = self._either.compositions(key)
        self._either.removed(key)
