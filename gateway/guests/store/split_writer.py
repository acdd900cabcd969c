"""Commits many batches together, and leaves out those whose data the database refuses.

A refused commit is halved until the batch at fault is alone: for one in n batches, this takes about 2 log2(n) commits.
So one tenant's data never fails the writes of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import structlog

from plait.gateway.guests.store.event_log import RefusedDataError
from plait.gateway.streams import Change, StreamKey

SHOWN = 80
"""Characters of a name in the log."""

log = structlog.get_logger(__name__)


class SplitWriter:
    """Writes batches in order, each as a whole or not at all.

    A stream that has lost a batch loses all later ones until it ends, so that the store has a prefix of it. One thread
    writes; others may read the attributes.
    """

    def __init__(self) -> None:
        self.commits = self.changes = 0
        self.refused = 0
        """Batches that were left out."""
        self.cut: frozenset[StreamKey] = frozenset()
        """Streams that have lost a batch and have not ended since."""

    def write(self, batches: Sequence[Sequence[Change]], commit: Callable[[Sequence[Change]], None]) -> None:
        """Commit all batches but the refused ones. Raises the errors of `commit` other than `RefusedDataError`."""
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
        """The log was read again: its streams, as stored, are whole."""
        self.cut = frozenset()

    def _left(self, batches: Sequence[Sequence[Change]]) -> tuple[list[Change], frozenset[StreamKey]]:
        """The changes without those of cut streams, and the streams that are still cut after them."""
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
        """Leave a batch out, except for the stream ends that it begins with: deleted data must not come back.

        A later end in the batch is left out, too: it may belong to a stream whose events the batch moves (`set_aside`).
        """
        self.refused += 1
        ends = list(takewhile(lambda change: change.data is None, batch))
        if ends and len(ends) < len(batch):
            self.write([ends], commit)
        self.cut |= {change.stream for change in batch if change.data is not None}
        kind, _, name = batch[0].stream
        log.error("the store refuses a change: it is left out", kind=kind, name=repr(name)[:SHOWN], problem=str(error))
