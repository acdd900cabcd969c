"""The answer of a call of a program, which any number of clients can read: a recording with one writer.

`RecordedAnswer` is the sink that the relay writes to. Each client `follow`s from the beginning at its own speed; while
the slowest is `MAX_LAG_BYTES` behind, the sink is full (backpressure). For durable sessions, `HeldEnd` goes in front of
`RecordedAnswer`, and holds back the end of the answer until the value is stored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from starlette.types import Message, Send

from plait.backends.errors import LimitError, PlaitError
from plait.backends.http.content_types import is_event_stream
from plait.gateway.asgi import EVENT_STREAM, Headers, MessageSink
from plait.gateway.guests.programs.core.record import Unrecorded
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.core.sessions import Sessions
from plait.gateway.guests.programs.unstored import unstored_headers, unstored_messages

MESSAGE_BYTES = 512
"""The memory of a message besides its body: a dictionary and a bytes object."""

KEEP_ALIVE = b": waiting\n\n"
"""A comment in a stream of server-sent events. Clients skip it."""

MAX_LAG_BYTES = 2**20
"""The writer waits while a follower is further behind. A stream of text takes minutes to generate as much."""

STREAM_END = b"data: [DONE]\n\n"


class Ledger(Protocol):
    """The limit that the bytes of a recording count against (`AnswerBytes`)."""

    def keep(self, size_bytes: int) -> bool:
        """Add bytes that are only kept for a repeated request. False, and nothing is added, beyond the limit."""

    def hold(self, size_bytes: int) -> None:
        """Add bytes that a client still has to read. Raises `PlaitError` beyond the limit."""

    def free(self, size_bytes: int) -> None: ...


class AnswerBytes:
    """Counts the buffered bytes of one call's answer against its tenant. No effect once the session has ended."""

    __slots__ = ("_session", "_sessions")

    def __init__(self, sessions: Sessions, session: Session) -> None:
        self._sessions = sessions
        self._session = session

    def keep(self, size_bytes: int) -> bool:
        """As `Ledger.keep`: allowed while the tenant's sessions have at most half of `max_held_bytes`."""
        session = self._session
        if session.ended or session.tenant.held_bytes + size_bytes > self._sessions.limits.max_held_bytes // 2:
            return False
        session.hold(size_bytes, is_answer=True)
        return True

    def hold(self, size_bytes: int) -> None:
        """As `Ledger.hold`. Raises `LimitError`."""
        session = self._session
        if session.ended:
            return
        if self._sessions.make_room(session, held_bytes=size_bytes) is not None:
            limit = self._sessions.limits.max_held_bytes
            message = (
                f"The answer was ended: the tenant's sessions hold {limit:,} bytes, which is the limit. Read answers "
                "faster, make fewer calls at once, or end sessions that are not needed; then send the call again."
            )
            raise LimitError(message, code="too_many_held_bytes", retry_after_s=1.0)
        session.hold(size_bytes, is_answer=True)

    def free(self, size_bytes: int) -> None:
        if not self._session.ended:
            self._session.hold(-size_bytes, is_answer=True)


class Follower:
    """A client's position: the number of messages and bytes that it was sent."""

    __slots__ = ("messages", "size_bytes")

    def __init__(self) -> None:
        self.messages = 0
        self.size_bytes = 0


class AnswerWindow:
    """A buffer of messages from one writer to `followers`. Synchronous.

    With `keeps`, the buffer has all messages, as long as `ledger` allows it. Otherwise it has only the messages that
    some follower has not been sent. `buffered_bytes` is the size of the messages in the buffer.
    """

    __slots__ = ("_first", "_ledger", "_messages", "_written_bytes", "buffered_bytes", "followers", "keeps")

    def __init__(self, ledger: Ledger, *, keeps: bool) -> None:
        self.keeps = keeps
        self.buffered_bytes = 0
        self.followers: dict[Follower, None] = {}
        self._ledger = ledger
        self._messages: deque[Message] = deque()
        self._first = 0  # the number of the first message in the buffer
        self._written_bytes = 0

    @property
    def lag_bytes(self) -> int:
        """How many bytes the slowest follower is behind."""
        written = self._written_bytes
        return written - min([follower.size_bytes for follower in self.followers], default=written)

    def next(self, follower: Follower) -> Message | None:
        """The next message for a follower; None if it has not been written yet."""
        place = follower.messages - self._first
        return self._messages[place] if place < len(self._messages) else None

    def write(self, message: Message) -> None:
        """Add a message. Raises the ledger's `PlaitError` if it exceeds the limit."""
        size_bytes = _size_bytes(message)
        if self.keeps and not self._ledger.keep(size_bytes):
            self.drop()
        if not self.keeps and self.followers:
            self._ledger.hold(size_bytes)
        self._written_bytes += size_bytes
        if self.keeps or self.followers:
            self.buffered_bytes += size_bytes
            self._messages.append(message)
        else:
            self._first += 1

    def was_sent(self, follower: Follower, message: Message) -> None:
        follower.messages += 1
        follower.size_bytes += _size_bytes(message)
        self._trim()

    def leave(self, follower: Follower) -> None:
        """A follower has the whole answer, or has disconnected."""
        del self.followers[follower]
        self._trim()

    def drop(self) -> None:
        """From now on, have only the messages that followers still need."""
        self.keeps = False
        self._trim()

    def clear(self) -> None:
        """Remove all messages. No follower may have been sent any."""
        self._messages.clear()
        self._free(self.buffered_bytes)
        self._first = self._written_bytes = 0

    def _trim(self) -> None:
        """Remove the messages that every follower has been sent, unless they are kept."""
        if self.keeps:
            return
        end = self._first + len(self._messages)
        for _ in range(min((follower.messages for follower in self.followers), default=end) - self._first):
            self._free(_size_bytes(self._messages.popleft()))
            self._first += 1

    def _free(self, size_bytes: int) -> None:
        self.buffered_bytes -= size_bytes
        self._ledger.free(size_bytes)


def _size_bytes(message: Message) -> int:
    return MESSAGE_BYTES + len(message.get("body", b""))


class RecordedAnswer(MessageSink):
    """The sink that records one answer for its followers. See `AnswerWindow` for `keeps` and `ledger`."""

    def __init__(self, ledger: Ledger, *, keeps: bool) -> None:
        self.status = 200
        """The answer's status, once it has begun."""
        self.window = AnswerWindow(ledger, keeps=keeps)
        self.ended = False
        self._is_ahead = False  # the sink is full: a follower is too far behind
        self._seen = False  # a client has been sent more than comments
        self._error: PlaitError | None = None
        self._waiting: list[asyncio.Future[bool]] = []

    @property
    def is_full(self) -> bool:
        """Whether a follower is more than `MAX_LAG_BYTES` behind, and has to read before more is written."""
        return not self.ended and self.window.lag_bytes > MAX_LAG_BYTES

    def put(self, message: Message) -> None:
        """Record a message of the response. Raises `PlaitError` beyond the tenant's limit."""
        self.window.write(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.ended = not message.get("more_body", False)
        self._is_ahead = self.is_full
        self._wake()

    def fail(self, error: PlaitError) -> None:
        """End the answer with an error, unless it has ended. In either case, the recording is not kept."""
        if not self.ended:
            self.ended, self._error = True, error
        self.window.drop()
        self._wake()

    def restore(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.window.write(message)
        self.ended = True

    def take_back(self) -> bool:
        """Discard the recording for a new delivery. False, and no effect, if a client has been sent a part of it."""
        if self._seen:
            return False
        self.window.clear()
        self.ended = False
        return True

    async def follow(self, send: Send, headers: Headers, keep_alive_s: float | None = None) -> None:
        """Send the answer to a client as it comes. Raises `PlaitError` only while nothing has been sent.

        For a stream, `keep_alive_s` is the silence after which a comment is sent, until the last event. If the answer
        has not begun, the first comment begins the response with status 200 and these `headers`; an answer with another
        status then becomes an error event.
        """
        follower = Follower()
        self.window.followers[follower] = None
        begun = refused = ended = False
        try:
            while not ended:
                message = await self._next(follower, keep_alive_s)
                if message is None:
                    await _keep_alive(send, headers, begun=begun)
                    begun = True
                    continue
                self._seen = True
                is_head = message["type"] == "http.response.start"
                ended = not is_head and not message.get("more_body", False)
                if is_head and begun:
                    refused = message["status"] != 200
                else:
                    await send({**message, "body": _event(message["body"])} if refused else message)
                begun = True
                if _is_end(message):
                    keep_alive_s = None
                self.window.was_sent(follower, message)
                self._wake()
        except PlaitError as error:
            if not begun:
                raise
            if not ended:
                await send({"type": "http.response.body", "body": _event(error.body())})
        finally:
            self.window.leave(follower)
            self._wake()

    async def _next(self, follower: Follower, within_s: float | None) -> Message | None:
        """Wait for a follower's next message; None after `within_s`. Raises the error of a failed answer."""
        until_s = None if within_s is None else asyncio.get_running_loop().time() + within_s
        while (message := self.window.next(follower)) is None:
            if self._error is not None:
                raise self._error
            if not await self._changes(until_s):
                return None
        return message

    async def _changes(self, until_s: float | None) -> bool:
        """Wait for a change: a message was written, or a follower has read or left. False after `until_s`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = None if until_s is None else loop.call_at(until_s, _set, waiter, False)
        self._waiting.append(waiter)
        try:
            return await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _wake(self) -> None:
        if self._is_ahead and not self.is_full:
            self._is_ahead = False
            if self.on_room is not None:
                self.on_room()
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                _set(waiter, True)


def _set(waiter: asyncio.Future[bool], has_changed: bool) -> None:
    if not waiter.done():
        waiter.set_result(has_changed)


async def _keep_alive(send: Send, headers: Headers, *, begun: bool) -> None:
    if not begun:
        await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *headers]})
    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


def _event(body: bytes) -> bytes:
    """A server-sent event with a JSON body."""
    return b"data: %b\n\n" % b" ".join(body.splitlines())


class HeldEnd(MessageSink):
    """Forwards an answer to a recording, but holds back its end until `release`.

    The end of a stream is its last event. With `is_whole`, or if the answer is no stream, all of it is held back.
    """

    def __init__(self, answer: RecordedAnswer, record: Unrecorded, *, is_whole: bool) -> None:
        self._to = answer
        self._record = record
        self._is_whole = is_whole
        self._buffered: list[Message] = []

    @property
    def on_room(self) -> Callable[[], None] | None:
        """Called when the slowest follower is not too far behind any more."""
        return self._to.on_room

    @on_room.setter
    def on_room(self, on_room: Callable[[], None] | None) -> None:
        self._to.on_room = on_room

    @property
    def is_full(self) -> bool:
        """As that of the recording."""
        return self._to.is_full

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._buffered)

    def put(self, message: Message) -> None:
        if self._buffered or self._is_whole or _is_end(message):
            self._buffered.append(message)
        elif message["type"] != "http.response.start":
            self._to.put(message)
        elif message["status"] != 200 or not is_event_stream(message["headers"]):
            self._buffered.append(message)  # an engine's refusal
        elif self._record.is_durable:
            self._to.put(message)
        else:
            self._to.put({**message, "headers": unstored_headers(message["headers"])})

    def clear(self) -> None:
        self._buffered.clear()

    async def release(self) -> None:
        """Wait for the commit, then forward the end, marked if it could not be stored.

        Raises `PlaitError` if no client may be answered, because another gateway owns the session.
        """
        held, self._buffered = self._buffered, []
        for message in await self._record.once_stored(held, unstored_messages, is_begun=True):
            self._to.put(message)


def _is_end(message: Message) -> bool:
    if message["type"] == "http.response.start":
        return False
    return not message.get("more_body", False) or bytes(message.get("body", b"")).endswith(STREAM_END)
