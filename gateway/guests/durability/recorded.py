"""The record of a durable session: appends its events to the log, and waits for their commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec

from plait.gateway.guests.peers.membership import UnreachableStoreError
from plait.gateway.guests.programs.core.held_call import HeldCall
from plait.gateway.guests.programs.core.record import (
    CallEnded,
    Kept,
    Opened,
    Refused,
    SessionEvent,
    Submitted,
    Unrecorded,
)
from plait.gateway.streams import DELETED, RECORD_VERSION, Change, StreamKey

AGAIN_S = 0.1
"""The period of retries while the store is out of reach."""

TOUCHES = 16
"""A use of a session is logged at most this often in a time to live, so that reads write little."""

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
    """The log that events are appended to (`Durability`)."""

    @property
    def problem(self) -> str | None:
        """Why nothing can be stored at present."""

    @property
    def is_over(self) -> bool:
        """Whether the next gateway continues the sessions: calls that end here without a value run again there."""

    def append(self, changes: Sequence[Change]) -> None:
        """Append one batch. Returns at once; the commit follows."""

    async def committed(self, stream: StreamKey) -> bool:
        """Wait until all that was appended is stored. False if it cannot be, or if the stream has lost an event.

        Raises `PlaitError` if no client may be answered without a commit.
        """


class Claimed(Unrecorded):
    """The record of a session in memory only, among several gateways: it has to claim its name in the store."""

    __slots__ = ("_claim",)

    def __init__(self, claim: asyncio.Future[None]) -> None:
        self._claim = claim

    async def once_stored(self, answer: T, unstored: Callable[[T], T], *, is_begun: bool = False) -> T:  # noqa: ARG002
        """Wait for the claim, so that other gateways know the owner. Raises `PlaitError` if it fails."""
        await asyncio.shield(self._claim)
        return answer


class Recorded(Unrecorded):
    """The record of a durable session. The log's times are Unix times: `offset_s` later than those of events."""

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
        return self._log.problem is None

    async def once_stored(self, answer: T, unstored: Callable[[T], T], *, is_begun: bool = False) -> T:
        """As `Unrecorded.once_stored`. Raises if the session has ended here, because another gateway owns it."""
        while True:
            try:
                return answer if await self._committed() else unstored(answer)
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
        """Append the events of the block as one batch, at its end."""
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
        """Begin the stream. Removes an earlier session with this name."""
        self._kept_s = now_s
        self._log.append([Change(self.stream, 0.0, None), self._change(Opened(ttl_s), now_s)])

    def touched(self, ttl_s: float, now_s: float) -> None:
        """Log the use now and then, so that a session that is only read does not expire after a restart."""
        if now_s - self._kept_s > ttl_s / TOUCHES:
            self._kept_s = now_s
            self._append(Kept(ttl_s), now_s)

    def submitted(self, call: HeldCall, now_s: float) -> None:
        """Log the call, unless it has no `request`: after a restart, nobody could get its answer."""
        if call.request is not None:
            request = call.request()
            self._append(Submitted(call.call_id, call.inputs, call.variables, call.fingerprint, request), now_s)
            call.mark_recorded()

    def write(self, event: SessionEvent, now_s: float) -> None:
        """Log an event, except for the end of a call after the handover: the next gateway runs the call again.

        A skip is logged even then, because the value that decides it is in the log, too.
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
