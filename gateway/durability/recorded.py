"""The record of a durable session: its events in a log, and whether what a client is told is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec

from plait.gateway.peers.membership import UnreachableStoreError
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.record import CallEnded, Kept, Opened, Refused, SessionEvent, Submitted, Unrecorded
from plait.gateway.store.event_log import Change, StreamKey

RECORD_VERSION = 1
"""Of the events (`record.py`). A later version reads earlier ones."""

SESSION = "session"
"""The kind of a session's stream."""

DELETED = "deleted"
"""The kind of the stream that says until when a deleted session's id is refused."""

AGAIN_S = 0.1
"""Between two looks whether a store that could not be reached can be."""

TOUCHES = 16
"""How often in its time to live a session that is only read is written to be alive."""

T = TypeVar("T")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[SessionEvent] = msgspec.msgpack.Decoder(SessionEvent)


def decoded(change: Change) -> SessionEvent:
    """The event in a change. Raises `msgspec.DecodeError`, also for one of a later version."""
    assert change.data is not None
    if change.version > RECORD_VERSION:
        raise msgspec.DecodeError(f"it has events of version {change.version}, and this release knows {RECORD_VERSION}")
    return _DECODER.decode(change.data)


def encoded(event: SessionEvent) -> bytes:
    return _ENCODER.encode(event)


class Log(Protocol):
    """Where events are written (`GroupCommit`)."""

    @property
    def problem(self) -> str | None:
        """Why nothing is stored for now; None if all is well."""

    @property
    def is_over(self) -> bool:
        """Whether another gateway goes on with the sessions: calls that end here without a value run again there."""

    def append(self, changes: Sequence[Change]) -> None:
        """Write these, after all that came before. Returns at once."""

    async def committed(self, stream: StreamKey) -> bool:
        """Wait until all that was appended is stored. False if it is not, or not all of the stream.

        Raises `PlaitError` if nobody may be told what is not stored.
        """


class Claimed(Unrecorded):
    """The record of a session in memory only, whose name no other gateway may take. Its `claim` is under way."""

    __slots__ = ("_claim",)

    def __init__(self, claim: asyncio.Future[None]) -> None:
        self._claim = claim

    async def told(self, news: T, unstored: Callable[[T], T], *, is_begun: bool = False) -> T:  # noqa: ARG002
        """Wait until others know whose session it is. Raises `PlaitError` if they cannot."""
        await asyncio.shield(self._claim)
        return news


class Recorded(Unrecorded):
    """The record of a durable session, in a log. The log's times are `offset_s` after those of the events."""

    __slots__ = ("_is_ended", "_is_whole", "_kept_s", "_log", "_offset_s", "_together", "stream")

    stores = True

    def __init__(self, log: Log, stream: StreamKey, offset_s: float) -> None:
        self.stream = stream
        self._log = log
        self._offset_s = offset_s
        self._kept_s = 0.0
        self._together: list[Change] | None = None
        self._is_whole: asyncio.Future[None] | None = None
        self._is_ended = False

    @property
    def is_durable(self) -> bool:
        """Whether the log can be written."""
        return self._log.problem is None

    async def told(self, news: T, unstored: Callable[[T], T], *, is_begun: bool = False) -> T:
        """Wait for the log. Raises if the session has ended here, because another gateway has it."""
        while True:
            try:
                return news if await self._committed() else unstored(news)
            except UnreachableStoreError:
                if not is_begun:
                    raise
                await asyncio.sleep(AGAIN_S)
                if self._is_ended:
                    raise

    async def _committed(self) -> bool:
        while self._together is not None:
            if self._is_whole is None:
                self._is_whole = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._is_whole)
        return await self._log.committed(self.stream)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep the events of the block until its end."""
        self._together = []
        try:
            yield
        finally:
            together, self._together = self._together, None
            if together and not self._is_ended:
                self._log.append(together)
            if self._is_whole is not None:
                self._is_whole.set_result(None)
                self._is_whole = None

    def opened(self, ttl_s: float, now_s: float) -> None:
        """The stream begins. What an earlier session of the name has left is removed."""
        self._kept_s = now_s
        self._log.append([Change(self.stream, 0.0, None), self._change(Opened(ttl_s), now_s)])

    def touched(self, ttl_s: float, now_s: float) -> None:
        """Write it now and then: a session that is only read must not expire for the next gateway."""
        if now_s - self._kept_s > ttl_s / TOUCHES:
            self._kept_s = now_s
            self._append(Kept(ttl_s), now_s)

    def submitted(self, call: HeldCall, now_s: float) -> None:
        """Write it. A call that cannot be made again, since nobody can get its answer any more, is left out."""
        if call.request is not None:
            request = call.request()
            self._append(Submitted(call.call_id, call.inputs, call.variables, call.fingerprint, request), now_s)
            call.mark_recorded()

    def write(self, event: SessionEvent, now_s: float) -> None:
        """Write it. When another gateway goes on, the calls that end here run again there.

        A skipped one does not: the value that decides is written, too.
        """
        if not (self._log.is_over and isinstance(event, CallEnded) and not event.is_skip):
            self._append(event, now_s)

    def deleted(self, until_s: float, now_s: float) -> None:
        stream = self.stream._replace(kind=DELETED)
        refused = self._change(Refused(until_s + self._offset_s), now_s)._replace(stream=stream)
        self._log.append([Change(stream, 0.0, None), refused])

    def ended(self) -> None:
        self._is_ended = True
        self._log.append([Change(self.stream, 0.0, None)])

    def _append(self, event: SessionEvent, now_s: float) -> None:
        change = self._change(event, now_s)
        if self._is_ended:
            return
        if self._together is None:
            self._log.append([change])
        else:
            self._together.append(change)

    def _change(self, event: SessionEvent, now_s: float) -> Change:
        return Change(self.stream, now_s + self._offset_s, encoded(event), RECORD_VERSION)
