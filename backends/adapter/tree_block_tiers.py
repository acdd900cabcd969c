"""Tree blocks by the tiers whose engine blocks hold them, each journaled in its fastest tier.

An engine block of `b` tokens need not be a part of one tree block. Tree block `k` is in a tier while the tier has the
engine blocks `64k // b` to `ceil(64(k + 1) / b) - 1` of a prompt: its holder. Prompts that differ behind the tree block
but within the holder's last engine block have holders of their own for the same tree block, so holders are counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.backends.adapter.cache_journal import CacheJournal


class TreeBlockTiers:
    """Keeps `journals`, one a tier, the fastest first."""

    def __init__(self, *journals: CacheJournal) -> None:
        self._journals = journals
        self._holders: dict[int, list[int]] = {}
        """By tree block: how many holders each tier has."""

    def add(self, block: int, parent: int | None, tier: int) -> None:
        """A tier has one more holder of `block`, which follows `parent`."""
        self._change(block, parent, tier, 1)

    def remove(self, block: int, parent: int | None, tier: int) -> None:
        self._change(block, parent, tier, -1)

    def move(self, blocks: Sequence[int], parent: int | None, was: int | None, now: int | None) -> None:
        """A holder of consecutive tree blocks, the first after `parent`, changes its tier; None: no tier has it."""
        for block in blocks if was != now else ():
            if now is not None:
                self.add(block, parent, now)
            if was is not None:
                self.remove(block, parent, was)
            parent = block

    def _change(self, block: int, parent: int | None, tier: int, change: int) -> None:
        holders = self._holders.setdefault(block, [0] * len(self._journals))
        was = _fastest(holders)
        holders[tier] += change
        now = _fastest(holders)
        if now == was:
            return
        if was is not None:
            self._journals[was].remove(block)
        if now is not None:
            self._journals[now].store(block, parent)
        else:
            del self._holders[block]


def _fastest(holders: Sequence[int]) -> int | None:
    return next((tier for tier, count in enumerate(holders) if count), None)
