"""The engine's side of the cache-state report: the tree blocks cached now, and the changes since a cursor.

The adapter calls `store` when its engine has cached a tree block, `remove` when the engine has evicted one. Every
change adds 1 to the engine's count of changes, and a report's cursor is that count. A journal keeps the cached blocks
and the latest removals, both in the order of their changes, so a delta is the tail of both. A block is never in both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, takewhile

from plait.backends.protocol.cache_state import StoredRun


class Changes:
    """Counters that all journals of one engine share, so that one cursor covers a report on all of them.

    `count` is the number of changes so far, `of_blocks` the count at the latest change of a block. `forgotten` is the
    count at the latest removal, or end of a call, that was dropped: no delta reaches back before it.
    """

    __slots__ = ("count", "forgotten", "of_blocks")

    def __init__(self) -> None:
        self.count = self.of_blocks = self.forgotten = 0


MAX_TOMBSTONES = 65_536
"""How many removals a journal remembers: enough for 4 million evicted tokens a second at one poll a second."""


class CacheJournal:
    """The tree blocks of one tier. Journals of several tiers of an engine share their `changes`."""

    def __init__(self, max_tombstones: int = MAX_TOMBSTONES, changes: Changes | None = None) -> None:
        self.changes = Changes() if changes is None else changes
        self._max_tombstones = max_tombstones
        self._stored: OrderedDict[int, tuple[int, int | None]] = OrderedDict()
        self._removed: OrderedDict[int, int] = OrderedDict()
        self.stored = self._stored.keys()
        """The tree blocks stored now."""

    @property
    def cursor(self) -> int:
        return self.changes.count

    @property
    def changed_at(self) -> int:
        """The count at the latest change of a block, in this journal or one that shares its `changes`."""
        return self.changes.of_blocks

    def store(self, block: int, parent: int | None) -> None:
        """`block` is cached now and follows `parent` (None: it starts a prompt). No change if it is stored already."""
        if block in self._stored:
            return
        self._removed.pop(block, None)
        self._stored[block] = (self._changed(), parent)

    def remove(self, block: int) -> None:
        """`block` was evicted. No change if it is not stored."""
        if self._stored.pop(block, None) is None:
            return
        self._removed[block] = self._changed()
        if len(self._removed) > self._max_tombstones:
            self.forget_until(self._removed.popitem(last=False)[1])

    def advance(self) -> int:
        """Count a change. Returns the new cursor."""
        self.changes.count += 1
        return self.changes.count

    def forget_until(self, cursor: int) -> None:
        """A removal, or the end of a call, at this cursor was dropped, so an older cursor gets a snapshot."""
        self.changes.forgotten = max(self.changes.forgotten, cursor)

    def remembers(self, cursor: int) -> bool:
        """Whether all changes since a cursor are known. A cursor in the future is of another epoch."""
        return self.changes.forgotten <= cursor <= self.changes.count

    def since(self, cursor: int | None) -> tuple[bool, list[StoredRun], list[int]]:
        """(is it a snapshot?, stored, removed) since `cursor`. A snapshot for None, or if a change is not known."""
        if cursor is None or not self.remembers(cursor):
            return True, _runs([(block, parent) for block, (_, parent) in self._stored.items()]), []
        stored = [(block, parent) for block, (_, parent) in self._stored_since(cursor)]
        return False, _runs(stored[::-1]), [block for block, _ in self._removed_since(cursor)]

    def changed(self, cursor: int) -> list[int] | None:
        """The tree blocks stored or removed since a cursor; None if they are not all known."""
        if not self.remembers(cursor):
            return None
        return [block for block, _ in chain(self._stored_since(cursor), self._removed_since(cursor))]

    def _changed(self) -> int:
        """Count a change of a block. Returns the new cursor."""
        self.changes.of_blocks = self.advance()
        return self.changes.of_blocks

    def _stored_since(self, cursor: int) -> Iterator[tuple[int, tuple[int, int | None]]]:
        """The latest first."""
        return takewhile(lambda item: item[1][0] > cursor, reversed(self._stored.items()))

    def _removed_since(self, cursor: int) -> Iterator[tuple[int, int]]:
        """The latest first."""
        return takewhile(lambda item: item[1] > cursor, reversed(self._removed.items()))


def _runs(blocks: list[tuple[int, int | None]]) -> list[StoredRun]:
    runs: list[StoredRun] = []
    previous: int | None = None
    for block, parent in blocks:
        if runs and parent == previous:
            runs[-1].hashes.append(block)
        else:
            runs.append(StoredRun(parent, [block]))
        previous = block
    return runs
