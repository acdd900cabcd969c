"""The tiers of an embedded engine below its accelerator: host memory and disk, each with its LRU and its link.

A block that the accelerator evicts is written to the fastest tier; a block that this tier evicts for it is written to
the next tier. A block that is loaded stays in its tier too, so that it need not be written again. Writing takes no
time, because it uses the other direction of the link and happens ahead of need, as in vLLM and SGLang.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.prefix_search import cached_blocks
from plait.backends.adapter.tier_journal import TierJournal
from plait.policy.costs.tier_link import LinkQueue, TierLink


@dataclass(frozen=True, slots=True)
class TierSettings:
    """One tier: the tokens that fit into it, and its link."""

    link: TierLink
    kv_tokens: int


@dataclass(slots=True, eq=False)
class _Tier:
    """The `blocks` in a tier by hash, the least recently used first."""

    link: TierLink
    total_blocks: int
    told: TierJournal
    queue: LinkQueue = field(default_factory=LinkQueue)
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)


class LowerTiers:
    """All of an engine's lower tiers, the fastest first. Their journals share the changes of `above`, the engine's own.

    `is_above` says whether the accelerator has a block. `moved` is called for each block that changes its tier.
    """

    def __init__(
        self,
        tiers: Sequence[TierSettings],
        block_tokens: int,
        above: CacheJournal,
        is_above: Callable[[int], bool],
        moved: Callable[[int], None],
    ) -> None:
        self._tiers = [
            _Tier(one.link, blocks, TierJournal(one.link.tier, CacheJournal(changes=above.changes), blocks, blocks))
            for one in tiers
            if (blocks := one.kv_tokens // block_tokens)
        ]
        self._block_tokens = block_tokens
        self._is_above = is_above
        self._moved = moved
        self.told = [tier.told for tier in self._tiers]
        """The tiers for the reports."""

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def __contains__(self, block_hash: int) -> bool:
        return self._fastest(block_hash) is not None

    def fastest(self, block_hash: int) -> int | None:
        """The fastest of these tiers that has a block, counted from 1; None: none has."""
        return next((tier for tier, one in enumerate(self._tiers, 1) if block_hash in one.blocks), None)

    def sink(self, block_hash: int) -> None:
        """The accelerator has evicted a block."""
        self._put(0, block_hash)

    def held(self, hashes: Sequence[int], start: int, end: int, guess: int = 0) -> int:
        """How many of a chain's blocks from `start` to `end` are here without a gap. A right `guess` saves look-ups."""
        return cached_blocks(end - start, guess, lambda index: hashes[start + index] in self)

    def load_s(self, hashes: Collection[int], now_s: float) -> float:
        """How many seconds from now a load of these blocks would end, after the loads in progress."""
        return max((tier.queue.wait_s(now_s) + load_s for tier, load_s in self._loads(hashes)), default=0.0)

    def load(self, hashes: Sequence[int], now_s: float) -> float:
        """Load blocks of a chain, which become the most recently used, the first block most. Returns when it ends."""
        ends_s = now_s
        for tier, load_s in self._loads(hashes):
            ends_s = max(ends_s, tier.queue.load(now_s, load_s))
            tier.told.loading_s += load_s
        for block_hash in reversed(hashes):
            found = self._fastest(block_hash)
            assert found is not None
            found.blocks.move_to_end(block_hash)
            found.told.loaded_tokens += self._block_tokens
        return ends_s

    def _loads(self, hashes: Collection[int]) -> list[tuple[_Tier, float]]:
        counts: dict[str, int] = {}
        for block_hash in hashes:
            tier = self._fastest(block_hash)
            if tier is not None:
                counts[tier.link.tier] = counts.get(tier.link.tier, 0) + 1
        return [
            (tier, tier.link.load_s(counts[tier.link.tier] * self._block_tokens))
            for tier in self._tiers
            if tier.link.tier in counts
        ]

    def _fastest(self, block_hash: int) -> _Tier | None:
        tier = self.fastest(block_hash)
        return None if tier is None else self._tiers[tier - 1]

    def _put(self, index: int, block_hash: int) -> None:
        """Write a block to a tier. The block evicted for it goes to the next tier, unless the accelerator has it."""
        if index == len(self._tiers):
            self._moved(block_hash)
            return
        tier = self._tiers[index]
        tier.blocks[block_hash] = None
        tier.blocks.move_to_end(block_hash)
        self._moved(block_hash)
        tier.told.free_blocks = max(0, tier.total_blocks - len(tier.blocks))
        if len(tier.blocks) > tier.total_blocks:
            oldest, _ = tier.blocks.popitem(last=False)
            if not self._is_above(oldest):
                self._put(index + 1, oldest)
