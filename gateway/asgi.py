"""HTTP helpers of the plain ASGI routes: headers, whole responses, and sinks (writers of answers with backpressure)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from math import ceil
from operator import itemgetter
from os import urandom
from typing import Any, Final, Protocol, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from plait.backends.errors import (
    BudgetExceededError,
    CallerError,
    EncodingNotSupportedError,
    MethodNotAllowedError,
    NoWebSocketError,
    PlaitError,
    SessionWaitingError,
    TooManyOpenRequestsError,
)
from plait.backends.http.content_types import is_event_stream
from plait.gateway.ids import LABEL

Headers = Sequence[tuple[bytes, bytes]]

RETRY_AFTER_S = {429: 1.0, 503: 1.0}
"""The default `Retry-After` of these statuses, in seconds. Nothing predicts a better time."""

MOST_RETRY_AFTER_S: Final = 60.0
"""The largest `Retry-After`. The SDKs of OpenAI and Anthropic ignore a longer one, and retry within seconds."""

PART_BYTES = 512 * 1024
"""Bodies are gathered in parts of this size. One buffer would be copied as it grows; single pieces could take 40 times
the body's size, if a client sends single bytes.
"""

NO_RETRY: Final = (b"x-should-retry", b"false")
"""Keeps the SDKs of OpenAI and Anthropic from retrying, which they do after a 429 and any 5xx."""

UNBUFFERED: Final = (b"x-accel-buffering", b"no")
"""A header of each stream: nginx forwards events as they come, instead of buffering them."""


def event(kind: str, data: object) -> bytes:
    """A server-sent event with JSON."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))


EVENT_STREAM: Final[Headers] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    UNBUFFERED,
)
"""The headers of a stream that begins in the gateway."""

NOT_DURABLE: Final = (b"plait-durable", b"false")
"""A header of an answer that could not be stored, although its session is durable."""

NAME: Final = itemgetter(0)
"""The name of a header."""

KEY_HEADERS: Final = frozenset((b"authorization", b"x-api-key", b"api-key"))
"""Headers in which clients send their API keys."""

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection, so no answer can be sent."""


def header(headers: Headers, name: bytes) -> str | None:
    """The first value of a header (`name` in lower case), as text."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def presented_keys(headers: Headers) -> list[bytes]:
    """The API keys of a request, a bearer token first. SDKs may send a second key, from an environment variable."""
    if KEY_HEADERS.isdisjoint(map(NAME, headers)):
        return []
    found = dict(reversed(headers))  # the first of several
    scheme, _, token = found.get(b"authorization", b"").partition(b" ")
    keys = token if scheme.lower() == b"bearer" else b"", found.get(b"x-api-key", b""), found.get(b"api-key", b"")
    return [key.strip() for key in keys if key.strip()]


def new_id() -> str:
    """128 random bits in hexadecimal."""
    return urandom(16).hex()


def id_of(scope: Scope) -> str:
    """The request's id: the client's `x-request-id` if it is a `LABEL`, else a new one. Cached in the scope."""
    found: str | None = scope.get(ID)
    if found is None:
        given = dict(reversed(scope["headers"])).get(b"x-request-id", b"").decode("latin-1")  # the first of several
        found = scope[ID] = given if given and LABEL.fits(given) else new_id()
    return found


OnEnd = Callable[[BaseException | None], None]
"""Called once when the request has ended, with its error or None."""

OnRefused = Callable[[Scope, PlaitError], None]
"""Called for each request that is answered with an error, by the part that answers it."""


class Sink(Protocol):
    """The writer of an answer. It buffers what the client has not read.

    Backpressure: while it `is_full`, nothing more should be written. It calls `on_room` when it is not full any more,
    and again when it `is_drained`, but never from within a write.
    """

    on_room: Callable[[], None] | None

    @property
    def is_full(self) -> bool:
        """Whether the client has to read before more is written."""

    @property
    def is_drained(self) -> bool:
        """Whether the client has been sent all that was written."""

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Write a whole answer with its content-length. A long one is not drained until the client has read it."""

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer of unknown length. Its head is sent with the first bytes of its body."""

    def write(self, body: bytes) -> None: ...

    def end(self, body: bytes = b"") -> None:
        """Write the last piece of the body."""

    async def flush(self, until: asyncio.Future[Any] | None = None) -> None:
        """Send what is written, and go on `until` this is done, or until there is room. Raises what sending raises."""


class ClientSink(Sink, Protocol):
    """The way to a client. An application that answers in place of an engine may use ASGI's `send`."""

    def send(self, message: Message) -> Awaitable[None]: ...


class Stage:
    """A part of an answer's way: it changes what it is given, and writes that to the next sink.

    Its subclasses change the `head`, the `body` of a whole answer, or the `events` of a stream.
    """

    def __init__(self, to: Sink) -> None:
        self._to = to
        self.last: Sink = to.last if isinstance(to, Stage) else to

    @property
    def on_room(self) -> Callable[[], None] | None:
        return self._to.on_room

    @on_room.setter
    def on_room(self, on_room: Callable[[], None] | None) -> None:
        self._to.on_room = on_room

    @property
    def is_full(self) -> bool:
        return self.last.is_full

    @property
    def is_drained(self) -> bool:
        return self._to.is_drained

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        self._to.whole(status, self.head(headers), self.body(status, body))

    def start(self, status: int, headers: Headers) -> None:
        self._to.start(status, self.head(headers))

    def write(self, body: bytes) -> None:
        self._to.write(self.events(body))

    def end(self, body: bytes = b"") -> None:
        self._to.end(self.events(body))

    def flush(self, until: asyncio.Future[Any] | None = None) -> Coroutine[Any, Any, None]:
        return self._to.flush(until)

    def head(self, headers: Headers) -> Headers:
        return headers

    def body(self, status: int, body: bytes | bytearray) -> bytes | bytearray:  # noqa: ARG002
        return body

    def events(self, events: bytes) -> bytes:
        """The client's events for whole events."""
        return events


class ClientStage(Stage):
    """A stage on the way to a client."""

    def __init__(self, to: ClientSink) -> None:
        super().__init__(to)
        self._sent: tuple[int, Headers] | None = None  # the head of an answer that is not written yet
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        """ASGI's send. An answer that is no stream of events is buffered, and written whole."""
        if message["type"] == "http.response.start":
            status, headers = message["status"], message["headers"]
            if status == 200 and is_event_stream(headers):
                self.start(status, headers)
            else:
                self._sent = status, [header for header in headers if NAME(header) != b"content-length"]
            return
        body, more_body = message.get("body", b""), message.get("more_body", False)
        if self._sent is None:
            (self.write if more_body else self.end)(body)
        else:
            self._parts.append(body)
            if more_body:
                return
            self.whole(*self._sent, b"".join(self._parts))
        await self.flush()


HIGH_WATER_BYTES: Final = 64 * 1024
"""A sink with more buffered bytes is full. The same as asyncio's default for transports."""


class MessageSink(ABC):
    """A sink that turns an answer into ASGI messages, and calls `put` with each."""

    on_room: Callable[[], None] | None = None

    @abstractmethod
    def put(self, message: Message) -> None:
        """Take the next message. Raises `PlaitError` to refuse the rest of the answer."""

    @property
    def is_full(self) -> bool:
        return False

    @property
    def is_drained(self) -> bool:
        return True

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        for message in in_parts(body):
            self.put(message)

    def start(self, status: int, headers: Headers) -> None:
        self.put({"type": "http.response.start", "status": status, "headers": list(headers)})

    def write(self, body: bytes) -> None:
        self.put({"type": "http.response.body", "body": body, "more_body": True})

    def end(self, body: bytes = b"") -> None:
        self.put({"type": "http.response.body", "body": body})

    async def flush(self, until: asyncio.Future[Any] | None = None) -> None:
        """Wait for `until`: `put` has taken each message at once."""
        if until is not None:
            await until


class AsgiSink(MessageSink):
    """A sink for any ASGI server: `flush` sends the messages."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._messages: deque[Message] = deque()
        self._unsent_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        return self._unsent_bytes > HIGH_WATER_BYTES

    @property
    def is_drained(self) -> bool:
        return not self._messages

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Write a whole answer. A long one is split when it is sent, so that it is not copied as a whole."""
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.put({"type": "http.response.body", "body": memoryview(body)})

    def send(self, message: Message) -> Awaitable[None]:
        """The application's own `send`: nothing may be left to be flushed."""
        return self._send(message)

    def put(self, message: Message) -> None:
        self._messages.append(message)
        self._unsent_bytes += len(message.get("body", b""))
        self._wake()

    async def flush(self, until: asyncio.Future[Any] | None = None) -> None:
        if until is not None:
            until.add_done_callback(self._wake)
        while True:
            while self._messages:
                message = self._messages[0]
                try:
                    whole = message.get("body")
                    for part in in_parts(whole) if isinstance(whole, memoryview) else (message,):
                        await self._send(part)
                except PlaitError:  # a wrapped `send` refuses the rest
                    self._messages.clear()
                    self._unsent_bytes = 0
                    raise
                self._messages.popleft()
                self._unsent_bytes -= len(message.get("body", b""))
                if self.on_room is not None and (not self._messages or not self.is_full):
                    self.on_room()
            if until is None or until.done():
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self, _until: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Nowhere(MessageSink):
    """The sink of a call without a client."""

    def put(self, message: Message) -> None:
        """Discard the message."""


ID: Final = "plait.id"
"""The key of `id_of` in a scope."""

UNREAD_S: Final = "plait.unread_s"
"""In a request's scope: for how long the system had its latest bytes before a late event loop read them."""

ON_KNOWN: Final = "plait.on_known"
"""The key in a scope for the function to call if the request has a valid key. Absent once its connection is known."""


class Client(msgspec.Struct, eq=False, kw_only=True):
    """The client of a request. The server calls `gone` when it disconnects, which calls `on_gone`."""

    is_gone: bool = False
    is_refused: bool = False
    """Whether the server itself answers the request with an error, so that the client counts as gone."""
    on_gone: Callable[[], object] | None = None

    @property
    def sink(self) -> ClientSink | None:
        """The server's own sink for the answer; None: the server takes only ASGI messages."""
        return None

    def gone(self) -> None:
        self.is_gone = True
        if self.on_gone is not None:
            self.on_gone()


class WrittenClient(ClientSink, Protocol):
    """A client that is the sink of its answer."""

    on_gone: Callable[[], object] | None


class WatchedReceive(msgspec.Struct, eq=False):
    """The ASGI receive of a request. `client` is set if the server reports when the client disconnects."""

    receive: Receive
    client: Client | None

    def __call__(self) -> Awaitable[Message]:
        return self.receive()

    def is_own(self, _send: Send) -> bool:
        """Whether the argument is the server's own `send`, so that no middleware changes the answer."""
        return False

    @property
    def has_answer(self) -> bool:
        """Whether an answer has begun. False if the server does not say."""
        return False


def sink_of(receive: Receive, send: Send) -> ClientSink:
    """The server's own sink if `send` leads straight to the client; else a sink that calls `send`."""
    if isinstance(receive, WatchedReceive) and receive.client is not None and receive.is_own(send):
        return receive.client.sink or AsgiSink(send)
    return AsgiSink(send)


def check_client(receive: Receive) -> None:
    """Raises `ClientGoneError` if the server has reported that the client has gone."""
    if isinstance(receive, WatchedReceive) and receive.client is not None and receive.client.is_gone:
        raise ClientGoneError


def is_refused(receive: Receive) -> bool:
    """Whether the server itself answers the request with an error."""
    return isinstance(receive, WatchedReceive) and receive.client is not None and receive.client.is_refused


async def unless_gone(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Run `work` in this task. If the client disconnects, `work` is cancelled and `ClientGoneError` is raised.

    If the server does not report disconnects, an extra task waits for one, which costs as much as a tenth of the call.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    client, watcher = receive.client if isinstance(receive, WatchedReceive) else None, None
    if client is None:
        client = Client()
        watcher = asyncio.ensure_future(_watch(receive, client))
    elif client.is_gone:
        work.close()
        raise ClientGoneError
    client.on_gone = partial(loop.call_soon, _cancel, task, client)  # not at once: work that ends now is not cancelled
    try:
        return await work
    except asyncio.CancelledError:
        if client.is_gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise  # cancelled by somebody else: the gateway stops
    finally:
        client.on_gone = None
        if watcher is not None:
            watcher.cancel()


def _cancel(task: asyncio.Task[Any], client: Client) -> None:
    """Cancel a task, unless its work has ended since `on_gone` was called."""
    if client.on_gone is not None:
        task.cancel()


async def _watch(receive: Receive, client: Client) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    client.gone()


async def send_whole(send: Send, status: int, headers: Headers, body: bytes | bytearray) -> None:
    """Send a response with its content-length. A long one is sent in parts, as the client reads it."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    for message in in_parts(body):
        await send(message)


async def send_error(send: Send, error: PlaitError, request_id: str, body: bytes | None = None) -> None:
    """Send an error with its status: an OpenAI error object, or another `body`."""
    sink = AsgiSink(send)
    write_error(sink, error, request_id, body)
    await sink.flush()


def write_error(sink: Sink, error: PlaitError, request_id: str, body: bytes | None = None) -> None:
    """Write an error with its status: an OpenAI error object, or another `body`."""
    headers = [*error_headers(error), (b"x-request-id", request_id.encode("latin-1"))]
    sink.whole(error.status, headers, error.body() if body is None else body)


def error_headers(error: PlaitError) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", b"application/json")]
    retry_after_s = RETRY_AFTER_S.get(error.status) if error.retry_after_s is None else error.retry_after_s
    if isinstance(error, BudgetExceededError) and not error.is_reserved and retry_after_s is not None:
        headers += [(b"retry-after", b"%d" % ceil(retry_after_s)), NO_RETRY]
    elif retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(min(retry_after_s, MOST_RETRY_AFTER_S)))).encode()))
    if not error.is_stored:
        headers.append(NOT_DURABLE)
    if isinstance(error, MethodNotAllowedError):
        headers.append((b"allow", b"POST"))
    if isinstance(error, NoWebSocketError):
        headers.append((b"upgrade", b"HTTP/1.1"))
    if isinstance(error, EncodingNotSupportedError):
        headers.append((b"accept-encoding", error.taken.encode()))
    if isinstance(error, TooManyOpenRequestsError):
        headers.append((b"connection", b"close"))
    if isinstance(error, SessionWaitingError):
        headers.append((b"plait-session-position", b"%d" % error.position))
    if not isinstance(error, CallerError) or error.status == 409:  # without the header, SDKs retry all of these
        headers.append((b"x-should-retry", b"false" if error.status == 409 else b"true"))
    return headers


def in_parts(body: bytes | bytearray | memoryview, *, more_body: bool = False) -> Iterator[Message]:
    """The ASGI messages of a body, in parts of `PART_BYTES`. `more_body`: whether more of it follows."""
    view = memoryview(body)
    for begin in range(0, max(1, len(body)), PART_BYTES):
        end = begin + PART_BYTES
        part = body if isinstance(body, bytes) and len(body) <= PART_BYTES else bytes(view[begin:end])
        message: Message = {"type": "http.response.body", "body": part}
        if more_body or end < len(body):
            message["more_body"] = True
        yield message
