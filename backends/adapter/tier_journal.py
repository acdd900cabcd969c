"""The engine's side of the reports on tiers below the accelerator: host memory, disk."""

from __future__ import annotations

from dataclasses import dataclass

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.protocol.cache_state import LowerTier


@dataclass(slots=True, eq=False)
class TierJournal:
    """One tier. `journal` has the tree blocks whose fastest copy is in it. The other fields are `LowerTier`'s."""

    tier: str
    journal: CacheJournal
    total_blocks: int = 0
    free_blocks: int | None = None
    loaded_tokens: int = 0
    loading_s: float = 0.0

    def since(self, cursor: int | None) -> LowerTier:
        """The changes since a cursor, or all of the tier for None and for a cursor that is not remembered."""
        _, stored, removed = self.journal.since(cursor)
        return LowerTier(
            self.tier, self.total_blocks, self.free_blocks, stored, removed, self.loaded_tokens, self.loading_s
        )
