"""Compaction: a session's log is written anew, shorter, when much of it does not matter any more.

The log of a session grows with each event. What does not matter any more (`outline.py`) may be far more than what does:
a call that fails in a loop leaves its request each time. Of a call that has ended by itself, what it would be made from
again is not needed either. So when a log has grown to `GROWTH` times what it was after its last compaction, and by
`FLOOR_BYTES` besides, the store's thread reads it. Another thread makes the shorter form, however long that takes:
meanwhile the store's thread commits, and renews its lease. Then the store's thread replaces what was read, in one
commit, and leaves what has come since behind it. A crash leaves the one or the other. A replay of both makes the same
session. A log that cannot become shorter is read again only when it has grown as much once more, so compaction costs a
constant part of all that is written. One log has its turn after the other.
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

from plait.gateway.chaining.chained_calls import once_answered
from plait.gateway.durability.outline import Outline, ended_calls
from plait.gateway.durability.recorded import SESSION, decoded, encoded
from plait.gateway.programs.held_call import KeptRequest
from plait.gateway.programs.record import SessionEvent, Submitted, ValueSet
from plait.gateway.store.event_log import Change, Keeper, StoredStream, StoreError, StreamKey
from plait.gateway.store.group_commit import GroupCommit

GROWTH: Final = 2
"""So no more is written again than twice what was appended since the last time."""

FLOOR_BYTES: Final = 2**18
"""No log is compacted before it has grown by so much: most sessions are smaller. It is read in a millisecond."""

MOST_EVENTS: Final = 200_000
"""A longer log stays as it is: PostgreSQL has this one read and replaced in 3.6 s, and a lease lasts 5 s."""

log = structlog.get_logger(__name__)


def compacted(changes: Sequence[Change]) -> Sequence[Change]:
    """The events of a session that still matter, and of each what is still needed. Raises `msgspec.MsgspecError`."""
    events = [decoded(change) for change in changes]
    kept = Outline(events).mattering
    changes, events = [changes[place] for place in kept], [events[place] for place in kept]
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
    """What is needed of the events of a call that has ended, each with its place."""
    kept = submitted.request
    if kept.kind == "answered":
        yield place, msgspec.structs.replace(submitted, request=once_answered(kept))
        return
    yield place, msgspec.structs.replace(submitted, request=KeptRequest(kept.kind, "", (), b""))
    for number, event in later:
        if isinstance(event, ValueSet) and event.text is not None:
            yield number, msgspec.structs.replace(event, text=None)


class Short(NamedTuple):
    """The shorter form of a log, and how many bytes the log has before and after it is replaced by that."""

    events: Sequence[Change]
    before: int
    after: int


def shortened(stream: StoredStream) -> Short:
    """The shorter form of a session's log. One that cannot be read stays: the next gateway sets it aside."""
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
    """Replace what was read of a log by these events, in the store's thread. What has come since stays behind it.

    False if the log has ended since, and another one may have its name. Raises `StoreError`.
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
    """How long the log of a session is, and was after its last compaction, in bytes; and its events."""

    now: int = 0
    compact: int = 0
    events: int = 0
    is_rewritten: bool = False
    """Whether a rewrite is under way."""

    @property
    def is_long(self) -> bool:
        has_grown = self.now > GROWTH * self.compact + FLOOR_BYTES
        return has_grown and self.events <= MOST_EVENTS and not self.is_rewritten

    def appended(self, size_bytes: int) -> None:
        self.now += size_bytes
        self.events += 1

    def was_rewritten(self, events: int, short: Short) -> None:
        """Count the shorter log in place of its first `events` events, and what was written meanwhile on top."""
        self.now -= short.before - short.after
        self.compact = short.after
        self.events -= events - len(short.events)


class Compaction:
    """Keeps the logs of sessions short: it counts what is written to each, and has `commit` rewrite those too long."""

    def __init__(self, commit: GroupCommit, keeper: Keeper) -> None:
        self._commit = commit
        self._keeper = keeper
        self._sizes: dict[StreamKey, LogSize] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def read(self, streams: Sequence[StoredStream]) -> None:
        """These were read, and go on."""
        for stream in streams:
            if stream.key.kind == SESSION:
                self._sizes[stream.key] = LogSize(size_bytes(stream.events), events=len(stream.events))

    def close(self) -> None:
        """Leave logs as they are."""
        for task in self._tasks:
            task.cancel()

    def forget(self) -> None:
        self._sizes.clear()

    def appended(self, changes: Sequence[Change]) -> None:
        """These will be written."""
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
        size.compact = size.now  # if this fails, the log is looked at again when it has grown
        try:
            async with self._turn:
                with suppress(StoreError):  # the store is away, and says so
                    stream = await self._commit.run(partial(self._keeper.stream, key))
                    short = await asyncio.to_thread(shortened, stream)
                    if short.after < short.before and await self._commit.run(
                        partial(replace, self._keeper, stream, short.events)
                    ):
                        size.was_rewritten(len(stream.events), short)
        finally:
            size.is_rewritten = False
