"""One keep-alive connection to an engine, and the response to each call on it as it arrives.

`Connection.begin` writes a request. Each read from the socket goes through httptools' parser, which appends the body's
chunks to the `Response`. The reader is woken once a read, not once a chunk, because this is the gateway's hottest path.
Above `HIGH_WATER_BYTES` of unread body the connection pauses reading (backpressure) until the reader has taken them.
One `Deadline` serves as timer for the first byte, for silence, and for an idle connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Protocol, Self, cast

import httptools
import msgspec

from plait.backends.errors import EngineError, EngineGarbledError, EngineTimeoutError
from plait.backends.http.body import SLICE_BYTES, Body, slices

CLOCK_STEP_S = 0.001  # the resolution of uvloop's clock and timers: a timer can fire this early


class Deadline:
    """A timer that every read may move: calls `on_expiry` when the time set by the last `move` has passed.

    A move to a later time only writes a number, since re-arming a timer at each read would cost too much. A timer that
    fires before that time starts again.
    """

    __slots__ = ("_armed_at_s", "_at_s", "_loop", "_on_expiry", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expiry: Callable[[], None]) -> None:
        self._loop = loop
        self._on_expiry = on_expiry
        self._at_s = inf
        self._armed_at_s = inf
        self._timer: asyncio.TimerHandle | None = None

    def move(self, delay_s: float) -> None:
        """Replaces the deadline: it is `delay_s` from now."""
        self._at_s = self._loop.time() + delay_s
        if self._at_s < self._armed_at_s:
            self._arm()

    def move_to(self, at_s: float) -> None:
        """Replaces the deadline: it is at this time of the event loop."""
        self._at_s = at_s
        if self._at_s < self._armed_at_s:
            self._arm()

    def cancel(self) -> None:
        """Stops the timer until the next `move`."""
        self._at_s = self._armed_at_s = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_at_s = self._at_s
        self._timer = self._loop.call_at(self._at_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._armed_at_s = inf
        if self._at_s - self._loop.time() > CLOCK_STEP_S:
            self._arm()
        else:
            self._on_expiry()


HIGH_WATER_BYTES = 64 * 1024
"""Reading pauses above this much unread body: asyncio's default for writing."""

JOINED_BYTES = 2**20
"""A longer body is gathered in one buffer. Joining pieces at the end would take twice its memory."""


class Source(Protocol):
    """What a response needs of its connection, or of the attempt to open one."""

    def resume(self) -> None:
        """Resumes reading if it was paused because more than `HIGH_WATER_BYTES` were unread."""

    def fail(self, error: EngineError) -> None:
        """Ends the exchange with `error` and closes the connection."""


class Response(msgspec.Struct, eq=False):
    """An engine's response to one call: its head, and its body in pieces as they arrive.

    The owner awaits `read_chunk` until `b""` or an error, or calls `abort`; one reader at a time. Or the owner sets
    `on_news` and calls `take` there. Only the connection adds `pieces` and calls `finish`, `fail` and `wake`. 1xx
    responses and trailers are left out.
    """

    source: Source | None = None  # None once the exchange has ended or failed
    status: int = 0  # 0 until the head is complete
    headers: list[tuple[bytes, bytes]] = []  # names in lower case
    pieces: list[bytes] = []  # the unread body
    unread_bytes: int = 0  # their sum
    error: EngineError | None = None  # why the exchange failed
    waiter: asyncio.Future[None] | None = None  # what the reader waits for
    on_news: Callable[[], None] | None = None  # called after each read from the socket, instead of the reader

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "arriving" if self.source is not None else "complete"
        return f"<Response {self.status} {state} unread={self.unread_bytes}>"

    @property
    def is_read(self) -> bool:
        """Whether the response has arrived without a failure and was read to its end."""
        return self.source is None and self.error is None and not self.pieces

    @property
    def is_small(self) -> bool:
        """Whether the response has arrived without a failure, and its unread body is below the high water mark."""
        return self.source is None and self.error is None and self.unread_bytes <= HIGH_WATER_BYTES

    async def head(self) -> Self:
        """The response itself, once its head has arrived. Raises `EngineError` if none arrives."""
        while not self.status and self.source is not None:
            await self.wait()
        if not self.status and self.error is not None:
            raise self.error
        return self

    def take(self) -> bytes:
        """The unread part of the body that has arrived; may be empty."""
        pieces, unread_bytes = self.pieces, self.unread_bytes
        self.pieces, self.unread_bytes = [], 0
        if unread_bytes > HIGH_WATER_BYTES and self.source is not None:
            self.source.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def put_back(self, rest: bytes) -> None:
        """The end of what was taken is unread again."""
        if rest:
            self.pieces.insert(0, rest)
            self.unread_bytes += len(rest)

    async def read_chunk(self) -> bytes:
        """The unread part of the body, once there is some; `b""` at the end and ever after.

        Raises `EngineError` (`EngineTimeoutError` for a silent engine) once the body before the failure is read.
        Cancellation aborts the response.
        """
        while not self.pieces:
            if self.error is not None:
                raise self.error
            if self.source is None:
                return b""
            await self.wait()
        return self.take()

    async def read(self, limit_bytes: int | None = None) -> bytes:
        """As `gather`, in bytes."""
        return bytes(await self.gather(limit_bytes))

    async def gather(self, limit_bytes: int | None = None) -> bytes | bytearray:
        """The rest of the body. Raises the errors of `read_chunk`, and `EngineGarbledError` beyond `limit_bytes`."""
        body = Gathered(limit_bytes)
        while self.source is not None or self.pieces:
            body.add(await self.read_chunk())
        if self.error is not None:
            raise self.error
        return body.whole()

    def abort(self) -> None:
        """Close the connection, so that the engine aborts the call. No effect on a response that is complete."""
        if self.source is not None:
            self.source.fail(EngineError("the response was given up before its end"))

    async def wait(self) -> None:
        """Waits for the next `wake`. Cancellation aborts the response."""
        assert self.waiter is None, "a response has one reader at a time"
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self.waiter = None

    def finish(self) -> None:
        self.source = None
        self.wake()

    def fail(self, error: EngineError) -> None:
        """Nothing more will arrive; the reader gets `error`."""
        self.source = None
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Call `on_news`, or wake the waiting reader."""
        if self.on_news is not None:
            self.on_news()
        elif self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Gathered:
    """Joins the pieces of a body that has at most `limit_bytes`."""

    __slots__ = ("_limit_bytes", "_long", "_pieces", "size")

    def __init__(self, limit_bytes: int | None) -> None:
        self.size = 0
        self._limit_bytes = inf if limit_bytes is None else limit_bytes
        self._pieces: list[bytes] = []
        self._long = bytearray()

    def add(self, piece: bytes) -> None:
        """Append a piece. Raises `EngineGarbledError` beyond the limit."""
        self.size += len(piece)
        if self.size > self._limit_bytes:
            raise EngineGarbledError(f"the engine's answer is longer than {self._limit_bytes} bytes")
        self._pieces.append(piece)
        if self.size > JOINED_BYTES:
            for one in self._pieces:
                self._long += one
            self._pieces.clear()

    def whole(self) -> bytes | bytearray:
        return self._long or (self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces))


HEAD_LIMIT_BYTES = 64 * 1024  # uvicorn's limit for request heads; the parser has none


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long an engine may keep a call waiting, in (finite) seconds.

    `connect_s` limits connecting, TLS included. `first_byte_s` then limits the time to the first byte of the body, not
    of the head: engines send a stream's head long before its first token. `idle_s` limits the time between two pieces.
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0


class Owner(Protocol):
    """What a connection calls in its pool."""

    def on_idle(self, connection: Connection) -> None:
        """The connection can carry another request."""

    def on_lost(self, connection: Connection) -> None:
        """The connection is closed."""

    def on_stale(self, response: Response, head: bytes, body: Body) -> None:
        """The reused connection closed before the first byte of the response: the engine had closed it while idle."""


class Connection(asyncio.Protocol):
    """A connection to the engine called `engine` that carries one exchange at a time.

    After an exchange the connection returns to `owner` if request and response are complete, the engine keeps the
    connection alive, and no byte came after the response. An idle connection closes after `idle_ttl_s`, or when a byte
    or an EOF arrives.
    """

    __slots__ = (
        "_again", "_begun", "_deadline", "_engine", "_head_bytes", "_idle_ttl_s", "_owner", "_parser",
        "_reading_paused", "_response", "_reusable", "_timeouts", "_unsent", "_used", "_whole", "_writing_paused",
        "transport",
    )  # fmt: skip

    def __init__(self, engine: str, timeouts: Timeouts, idle_ttl_s: float, owner: Owner) -> None:
        self._engine = engine
        self._timeouts = timeouts
        self._idle_ttl_s = idle_ttl_s
        self._owner = owner
        self.transport: asyncio.Transport  # from `connection_made` on, which is the first event
        self._deadline = Deadline(asyncio.get_running_loop(), self._on_deadline)
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None  # None while idle
        self._used = False  # it has carried an exchange before this one
        self._head_bytes = 0
        self._begun = False  # some of the response's body has arrived
        self._whole = False  # the response is complete
        self._reusable = False
        self._again: tuple[bytes, Body] | None = None  # the request, while it may have to be sent again
        self._unsent: Iterator[bytes | memoryview] | None = None  # of a long body
        self._reading_paused = False
        self._writing_paused = False

    def begin(self, response: Response, head: bytes, body: Body) -> None:
        """Send a request and begin to fill its `response`. The connection must be open and idle."""
        self._response = response
        response.source = self
        self._head_bytes = 0
        self._begun = self._whole = self._reusable = False
        self._deadline.move(self._timeouts.first_byte_s)
        if self._used:  # only a reused connection can be stale
            self._again = head, body
        if isinstance(body, bytes) and len(body) <= SLICE_BYTES:
            self.transport.write(head + body)  # a copy of 100 KB costs less than a second system call
        else:
            self.transport.write(head)
            self._unsent = slices(body)
            self._send_more()

    def close(self) -> None:
        """Closes at once; a response that is still arriving fails."""
        self.fail(EngineError(f"engine {self._engine}: the gateway closed its connection in the middle of a call"))

    def lose(self, error: EngineError, *, waiting_only: bool) -> None:
        """Ends the exchange with `error`, or (`waiting_only`) only if no byte of a body has arrived."""
        if not waiting_only or (self._response is not None and not self._begun):
            self.fail(error)

    def _send_more(self) -> None:
        """Send a long body, slice by slice: the transport copies what the socket does not take at once.

        An engine that answers early (a 413) may stop reading. A connection with an unsent rest is not reused.
        """
        response = self._response
        while self._unsent is not None and response is not None and not self._writing_paused:
            piece = next(self._unsent, None)
            if piece is None:
                self._unsent = None
            else:
                self.transport.write(piece)

    # Called by the reader of the response.

    def resume(self) -> None:
        if not self._reading_paused:
            return
        self._reading_paused = False
        self._deadline.move(self._timeouts.idle_s)
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def fail(self, error: EngineError) -> None:
        response, self._response, self._unsent = self._response, None, None
        self.transport.abort()
        if response is not None:
            response.fail(error)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open. asyncio and uvloop have set TCP_NODELAY."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass, but has the methods

    def data_received(self, data: bytes) -> None:
        """Parse one read, then act once. After an exchange the connection becomes idle, or closes."""
        response = self._response
        if response is None:  # bytes on an idle connection: the next exchange must not take them for its response
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._reusable = False
            if not self._whole:
                message = f"engine {self._engine} sent bytes that are not an HTTP/1.1 response: {error}"
                self.fail(EngineGarbledError(message))
                return
        if not self._whole:
            if response.status:
                self._on_body_read(response)
            else:
                self._on_head_read(data)
            return
        if self._reading_paused:
            self.resume()  # reading must go on to notice when the engine closes the idle connection
        self._response = None
        if self._reusable and self._unsent is None and not self.transport.get_write_buffer_size():
            self._used, self._again, self._unsent = True, None, None
            self._deadline.move(self._idle_ttl_s)
            self._owner.on_idle(self)
        else:
            self.close()
        response.source = None
        response.wake()

    def eof_received(self) -> None:
        """The engine closed its side."""
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side."""
        self._deadline.cancel()
        self._end(exc)
        self._owner.on_lost(self)

    def pause_writing(self) -> None:
        """The transport's write buffer is full."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """The transport's write buffer has room again."""
        self._writing_paused = False
        self._send_more()

    # Called by the parser. A response gets its status when its head is complete. Data after its end is ignored.

    def on_message_begin(self) -> None:
        """A response begins. If it is a second one, the connection is not reused."""
        if self._whole:
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Trailers are dropped."""
        response = self._response
        if response is not None and not response.status:
            response.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete. After a 1xx head comes another response."""
        response = self._response
        if response is None or response.status:
            return
        status = self._parser.get_status_code()
        if status >= 200:
            response.status = status
        else:
            response.headers.clear()

    def on_body(self, body: bytes) -> None:
        """A chunk of the body, or the part of a chunk that was in one read."""
        response = self._response
        if response is not None and not self._whole:
            response.pieces.append(body)
            response.unread_bytes += len(body)

    def on_message_complete(self) -> None:
        """The response is complete. The parser knows only now whether the engine keeps the connection alive."""
        if self._response is not None and self._response.status and not self._whole:
            self._whole = True
            self._reusable = self._parser.should_keep_alive()

    def _on_head_read(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_LIMIT_BYTES:
            message = f"engine {self._engine} sent a response head of over {HEAD_LIMIT_BYTES} bytes"
            self.fail(EngineGarbledError(message))

    def _on_body_read(self, response: Response) -> None:
        if self._unsent is not None:
            self._send_more()
        if response.unread_bytes:
            self._begun = True
            self._deadline.move(self._timeouts.idle_s)
        if response.unread_bytes > HIGH_WATER_BYTES:
            self._reading_paused = True
            self.transport.pause_reading()
        response.wake()

    def _end(self, exc: Exception | None) -> None:
        """The connection has ended: the end of a body without a length, a stale connection, or a failure."""
        response = self._response
        if response is not None and response.status and exc is None and _ends_with_connection(response):
            self._response = None
            response.finish()
            self.close()
        elif response is not None and self._again is not None and not self._head_bytes and not response.status:
            self._response = None
            self.close()
            self._owner.on_stale(response, *self._again)
        else:
            reason = f" ({exc})" if exc is not None else ""
            began = response is not None and response.status
            what = "in the middle of a response" if began else "without a response"
            self.fail(EngineError(f"engine {self._engine} closed the connection {what}{reason}"))

    def _on_deadline(self) -> None:
        response = self._response
        if response is None:
            self.close()
        elif self._reading_paused:  # the reader is slow, not the engine
            self._deadline.move(self._timeouts.idle_s)
        elif self._begun:
            silence = f"went silent for {self._timeouts.idle_s:g} s in the middle of a response"
            self.fail(EngineTimeoutError(f"engine {self._engine} {silence}"))
        else:
            silence = f"did not begin to answer within {self._timeouts.first_byte_s:g} s"
            self.fail(EngineTimeoutError(f"engine {self._engine} {silence}"))


def _ends_with_connection(response: Response) -> bool:
    """Whether the body ends with the connection, because it has no length and no chunks (RFC 9112, 6.3)."""
    return not any(
        name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())
        for name, value in response.headers
    )
