"""Writes batches together, and leaves out those whose data the log refuses.

Many batches share a commit, so one at fault must not fail the others. What is refused is halved until the batch at
fault is alone: of n batches with one at fault, about 2 log2(n) commits are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import structlog

from plait.gateway.store.event_log import Change, RefusedDataError, StreamKey

SHOWN = 80
"""Characters of a name in the log."""

log = structlog.get_logger(__name__)


class SplitWriter:
    """Writes in the order in which batches came, each as a whole or not at all.

    A stream that has lost a batch loses all later ones, too, until it ends: what is stored of it is a beginning. One
    thread writes; others may read.
    """

    def __init__(self) -> None:
        self.commits = self.changes = 0
        """Written so far."""
        self.refused = 0
        """Batches that were left out so far, because of their own data."""
        self.cut: frozenset[StreamKey] = frozenset()
        """Streams that have lost a batch and have not ended since."""

    def write(self, batches: Sequence[Sequence[Change]], commit: Callable[[Sequence[Change]], None]) -> None:
        """Commit all but what is refused. Raises all errors of `commit` but `RefusedDataError`."""
        changes, cut = self._left(batches)
        try:
            if changes:
                commit(changes)
        except RefusedDataError as error:
            if len(batches) == 1:
                self._leave_out(batches[0], error, commit)
                return
            middle = len(batches) // 2
            self.write(batches[:middle], commit)
            self.write(batches[middle:], commit)
        else:
            self.cut = cut
            self.commits += 1
            self.changes += len(changes)

    def forget(self) -> None:
        """The log is read anew, and its streams are whole as they are there."""
        self.cut = frozenset()

    def _left(self, batches: Sequence[Sequence[Change]]) -> tuple[list[Change], frozenset[StreamKey]]:
        """The changes without those of streams that are cut, and which of these are cut after them."""
        changes = [change for batch in batches for change in batch]
        if not self.cut:
            return changes, self.cut
        left, cut = list[Change](), set(self.cut)
        for change in changes:
            if change.data is None:
                cut.discard(change.stream)
            if change.stream not in cut:
                left.append(change)
        return left, frozenset(cut)

    def _leave_out(
        self, batch: Sequence[Change], error: RefusedDataError, commit: Callable[[Sequence[Change]], None]
    ) -> None:
        """Leave a batch out, but for the ends that it begins with: what was stored before them is not to come back.

        A later end may be that of a stream whose events were to be kept under another name.
        """
        self.refused += 1
        ends = list(takewhile(lambda change: change.data is None, batch))
        if ends and len(ends) < len(batch):
            self.write([ends], commit)
        self.cut |= {change.stream for change in batch if change.data is not None}
        kind, _, name = batch[0].stream
        log.error("the store refuses a change: it is left out", kind=kind, name=repr(name)[:SHOWN], problem=str(error))
