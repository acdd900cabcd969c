"""Log compaction: rewrites a session's log without the requests of calls that have ended, which are most of it.

A replay does not need them: only that there was a call, and what it has produced.

- Trigger: the log exceeds `GROWTH` times its size after the last compaction, plus `FLOOR_BYTES`. A log that could not
  be shortened has to grow as much again, so compaction costs a constant share of all writes.
- Work: the store's thread reads the log; another thread computes the short form, while the store's thread goes on with
  commits and the lease; the store's thread replaces the events that were read, in one commit, and keeps later ones.
- Invariant: a replay of the short form makes the same session. A crash leaves the one form or the other.

One log is compacted at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import msgspec
import structlog

from plait.gateway.guests.durability.ended_calls import ended_calls
from plait.gateway.guests.durability.recorded import decoded, encoded
from plait.gateway.guests.programs.chained_calls import once_answered
from plait.gateway.guests.programs.core.held_call import KeptRequest
from plait.gateway.guests.programs.core.record import SessionEvent, Submitted, ValueSet
from plait.gateway.guests.store.event_log import Keeper, StoreError
from plait.gateway.guests.store.group_commit import GroupCommit
from plait.gateway.streams import SESSION, Change, StoredStream, StreamKey

GROWTH: Final = 2
"""With 2, a rewrite is at most twice what was appended since the last one."""

FLOOR_BYTES: Final = 2**18
"""The growth below which no log is compacted. Most sessions stay below it; it takes a millisecond to read."""

MOST_EVENTS: Final = 200_000
"""A longer log is not compacted: PostgreSQL takes 3.6 s to read and replace this one, and a lease lasts 5 s."""

log = structlog.get_logger(__name__)


def compacted(changes: Sequence[Change]) -> Sequence[Change]:
    """The events of a session without the fields that do not matter any more. Raises `msgspec.MsgspecError`."""
    events = [decoded(change) for change in changes]
    short = dict[int, SessionEvent]()
    for place, later in ended_calls(events).items():
        submitted = events[place]
        assert isinstance(submitted, Submitted)
        short |= _once_ended(place, submitted, [(number, events[number]) for number in later])
    return [
        change._replace(data=encoded(short[place])) if place in short else change
        for place, change in enumerate(changes)
    ]


def _once_ended(
    place: int, submitted: Submitted, later: Iterable[tuple[int, SessionEvent]]
) -> Iterator[tuple[int, SessionEvent]]:
    """The short forms of the events of a call that has ended, each with its place."""
    kept = submitted.request
    if kept.kind == "answered":
        yield place, msgspec.structs.replace(submitted, request=once_answered(kept))
        return
    yield place, msgspec.structs.replace(submitted, request=KeptRequest(kept.kind, "", (), b""))
    for number, event in later:
        if isinstance(event, ValueSet) and event.text is not None:
            yield number, msgspec.structs.replace(event, text=None)


class Short(NamedTuple):
    """The short form of a log, and the log's size in bytes before and after the replacement."""

    events: Sequence[Change]
    before: int
    after: int


def shortened(stream: StoredStream) -> Short:
    """The short form of a session's log. An unreadable log stays as it is: the next start sets it aside."""
    events, problem = stream.events, stream.problem
    if problem is None:
        try:
            events = compacted(stream.events)
        except msgspec.MsgspecError as error:
            problem = str(error)
    if problem is not None:
        _, tenant, session = stream.key
        log.error("the log of a session cannot be compacted", tenant=tenant, session=session, problem=problem)
    return Short(events, size_bytes(stream.events), size_bytes(events))


def replace(keeper: Keeper, stream: StoredStream, events: Sequence[Change]) -> bool:
    """Replace the events that were read by `events`, and keep later ones. Runs in the store's thread.

    False if the log has ended since; a new session may have its name. Raises `StoreError`.
    """
    now, count = keeper.stream(stream.key).events, len(stream.events)
    if now[:count] != stream.events:
        return False
    keeper.write([Change(stream.key, 0.0, None), *events, *now[count:]])
    return True


def size_bytes(changes: Sequence[Change]) -> int:
    return sum(len(change.data or b"") for change in changes)


@dataclass(slots=True, eq=False)
class LogSize:
    """The size of a session's log."""

    now: int = 0
    """Bytes."""
    compact: int = 0
    """Bytes after the last compaction."""
    events: int = 0
    """The number of events."""
    is_rewritten: bool = False
    """Whether a compaction is running or queued."""

    @property
    def is_long(self) -> bool:
        has_grown = self.now > GROWTH * self.compact + FLOOR_BYTES
        return has_grown and self.events <= MOST_EVENTS and not self.is_rewritten

    def appended(self, size_bytes: int) -> None:
        self.now += size_bytes
        self.events += 1

    def was_rewritten(self, short: Short) -> None:
        """What was read was replaced by the short form; later events still count."""
        self.now -= short.before - short.after
        self.compact = short.after


class Compaction:
    """Tracks the sizes of all sessions' logs, and compacts those that are too long."""

    def __init__(self, commit: GroupCommit, keeper: Keeper) -> None:
        self._commit = commit
        self._keeper = keeper
        self._sizes: dict[StreamKey, LogSize] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def read(self, streams: Sequence[StoredStream]) -> None:
        """Track streams that were read from the store."""
        for stream in streams:
            if stream.key.kind == SESSION:
                self._sizes[stream.key] = LogSize(size_bytes(stream.events), events=len(stream.events))

    def close(self) -> None:
        """Cancel running and queued compactions."""
        for task in self._tasks:
            task.cancel()

    def forget(self) -> None:
        self._sizes.clear()

    def appended(self, changes: Sequence[Change]) -> None:
        """Count changes that were appended to the log, and start compactions."""
        for change in changes:
            if change.stream.kind != SESSION:
                continue
            if change.data is None:
                self._sizes.pop(change.stream, None)
                continue
            size = self._sizes.get(change.stream)
            if size is None:
                size = self._sizes[change.stream] = LogSize()
            size.appended(len(change.data))
            if size.is_long:
                size.is_rewritten = True
                task = asyncio.ensure_future(self._rewrite(change.stream, size))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _rewrite(self, key: StreamKey, size: LogSize) -> None:
        size.compact = size.now  # if the log cannot be shortened, it has to grow again before the next try
        try:
            async with self._turn:
                with suppress(StoreError):  # the store logs its problem itself
                    stream = await self._commit.run(partial(self._keeper.stream, key))
                    short = await asyncio.to_thread(shortened, stream)
                    if short.after < short.before and await self._commit.run(
                        partial(replace, self._keeper, stream, short.events)
                    ):
                        size.was_rewritten(short)
        finally:
            size.is_rewritten = False
