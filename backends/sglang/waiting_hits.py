"""Keeps the cached tokens of SGLang's waiting calls, as the cache changes.

A call's hit stays the same while the tree block before its end stays stored and the one behind is not stored. So a step
looks at the calls beside the blocks that have changed, not at every waiting call.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.calls import SglangCall, find_hit


class WaitingHits:
    """Keeps the `hit_tokens` of the calls that wait. A step calls `follow` before it reads them."""

    def __init__(self, observer: CacheObserver) -> None:
        self._journal = observer.journal
        self._granularity = observer.granularity_tokens
        self._cursor = self._journal.cursor
        self._new: dict[SglangCall, None] = {}
        self._beside: dict[int, set[SglangCall]] = {}
        """By the hash of a tree block: the calls whose hits end before it or behind it."""

    def queued(self, call: SglangCall) -> None:
        """A call begins to wait."""
        self._new[call] = None

    def left(self, call: SglangCall) -> None:
        """A call no longer waits."""
        self._new.pop(call, None)
        self._drop(call)

    def follow(self) -> None:
        """Find the hits of new calls, and of the calls whose hits the cache's changes may have moved."""
        journal, beside = self._journal, self._beside
        changed, self._cursor = journal.changed(self._cursor), journal.cursor
        blocks = beside.keys() if changed is None else beside.keys() & changed
        moved = {call for block in blocks for call in beside[block]}
        for call in moved:
            self._drop(call)
        for call in (*moved, *self._new):
            find_hit(call, journal.stored, self._granularity)
            for block in self._ends(call):
                beside.setdefault(block, set()).add(call)
        self._new.clear()

    def _drop(self, call: SglangCall) -> None:
        for block in self._ends(call):
            calls = self._beside.get(block, set())
            calls.discard(call)
            if not calls:
                self._beside.pop(block, None)

    def _ends(self, call: SglangCall) -> Sequence[int]:
        """The tree blocks before and behind the end of a call's hit."""
        hit = call.hit_tokens // self._granularity
        return call.tree_blocks[max(0, hit - 1) : hit + 1]
