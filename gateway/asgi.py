"""The HTTP helpers of the plain ASGI routes: headers, whole responses, and sinks of answers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from operator import itemgetter
from os import urandom
from typing import Any, Final, Protocol, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from plait.backends.errors import (
    CallerError,
    EncodingNotSupportedError,
    MethodNotAllowedError,
    NoWebSocketError,
    PlaitError,
    SessionWaitingError,
)
from plait.gateway.ids import LABEL

Headers = Sequence[tuple[bytes, bytes]]

RETRY_AFTER_S = {429: 1.0, 503: 1.0}
"""What a client is asked to wait after these statuses if the error does not say. Nothing predicts a better time."""

MOST_RETRY_AFTER_S: Final = 60.0
"""No client is told to stay away for longer. The SDKs of OpenAI and Anthropic pay no heed to a longer time, and come
again within seconds.
"""

PART_BYTES = 512 * 1024
"""A body is gathered in parts. As one it would be copied as it grows. As single pieces it could take 40 times its
size, if a client sends single bytes.
"""

UNBUFFERED: Final = (b"x-accel-buffering", b"no")
"""A header of each stream: nginx passes events on as they come, and does not keep them until its buffer is full."""

EVENT_STREAM: Final[Headers] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    UNBUFFERED,
)
"""The headers of a stream that begins in the gateway."""

NOT_DURABLE: Final = (b"plait-durable", b"false")
"""A header of an answer that tells of what is not stored, though it should be."""

NAME: Final = itemgetter(0)
"""Of a header."""

KEY_HEADERS: Final = frozenset((b"authorization", b"x-api-key", b"api-key"))
"""Headers in which clients send their API keys."""

SESSION_HEADERS: Final = frozenset((
    b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-id", b"x-opencode-session",
    b"x-session-affinity", b"conversation_id",
))  # fmt: skip
"""Headers that name a session: those of Claude Code, Codex (new and old) and OpenCode, and those shared by others."""

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
    """The API keys of a request, a bearer token first. A client may send one of its environment beside its own."""
    if KEY_HEADERS.isdisjoint(map(NAME, headers)):
        return []
    found = dict(reversed(headers))  # the first of several
    scheme, _, token = found.get(b"authorization", b"").partition(b" ")
    keys = token if scheme.lower() == b"bearer" else b"", found.get(b"x-api-key", b""), found.get(b"api-key", b"")
    return [key.strip() for key in keys if key.strip()]


def new_id() -> str:
    """A name for a request: 128 random bits."""
    return urandom(16).hex()


def id_of(scope: Scope) -> str:
    """The client's name for its request, or a new one if that is no `LABEL`. The request keeps it."""
    found: str | None = scope.get(ID)
    if found is None:
        given = dict(reversed(scope["headers"])).get(b"x-request-id", b"").decode("latin-1")  # the first of several
        found = scope[ID] = given if LABEL.fits(given) else new_id()
    return found


OnEnd = Callable[[BaseException | None], None]
"""Told that what was begun has ended, by an error or without one."""

OnRefused = Callable[[Scope, PlaitError], None]
"""Told that a request is answered with an error, by who answers it."""


class Sink(Protocol):
    """Where the answer to a request goes. What is written waits in the sink until the client reads it.

    The sink `is_full` while that is much: nothing more should be written until it calls `on_room`, later on and never
    while something is written. It also calls that
    when it `is_drained`.
    """

    on_room: Callable[[], None] | None

    @property
    def is_full(self) -> bool:
        """Whether the client has to read before more is written."""

    @property
    def is_drained(self) -> bool:
        """Whether the client has been sent all that was written."""

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """All of an answer, which gets its length. A long one is not drained until the client has read it."""

    def start(self, status: int, headers: Headers) -> None:
        """An answer begins whose length is not known. Its head goes out with the first bytes of its body."""

    def write(self, body: bytes) -> None:
        """A piece of its body."""

    def end(self, body: bytes = b"") -> None:
        """The last piece of its body."""

    async def flush(self, until: asyncio.Future[Any] | None = None) -> None:
        """Send what is written, and what is written `until` then. Raises what the sending raises."""


HIGH_WATER_BYTES: Final = 64 * 1024
"""A sink is full above this. It is what asyncio's transports take."""


class MessageSink(ABC):
    """A sink that makes ASGI's messages, each of which is `put`."""

    def __init__(self) -> None:
        self._on_room: Callable[[], None] | None = None

    @property
    def on_room(self) -> Callable[[], None] | None:
        """Called when the client has read what was too much."""
        return self._on_room

    @on_room.setter
    def on_room(self, on_room: Callable[[], None] | None) -> None:
        self._on_room = on_room

    @abstractmethod
    def put(self, message: Message) -> None:
        """Take the next message. Raises `PlaitError` if the rest of the answer is not wanted."""

    @property
    def is_full(self) -> bool:
        """Whether the client has to read before more is written."""
        return False

    @property
    def is_drained(self) -> bool:
        """Whether the client has been sent all that was written."""
        return True

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        for message in _in_parts(body):
            self.put(message)

    def start(self, status: int, headers: Headers) -> None:
        """An answer begins whose length is not known."""
        self.put({"type": "http.response.start", "status": status, "headers": list(headers)})

    def write(self, body: bytes) -> None:
        self.put({"type": "http.response.body", "body": body, "more_body": True})

    def end(self, body: bytes = b"") -> None:
        self.put({"type": "http.response.body", "body": body})

    async def flush(self, until: asyncio.Future[Any] | None = None) -> None:
        """Wait `until` then: each message is taken where it is put."""
        if until is not None:
            await until


class AsgiSink(MessageSink):
    """A sink for any ASGI server: `flush` sends the messages."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send
        self._messages: deque[Message] = deque()
        self._unsent_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the client has to read before more is written."""
        return self._unsent_bytes > HIGH_WATER_BYTES

    @property
    def is_drained(self) -> bool:
        """Whether the client has been sent all that was written."""
        return not self._messages

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """All of an answer. A long one is parted as it is sent, so that it is held once."""
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.put({"type": "http.response.body", "body": memoryview(body)})

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
                    for part in _in_parts(whole) if isinstance(whole, memoryview) else (message,):
                        await self._send(part)
                except PlaitError:  # whoever takes the messages takes no more of them
                    self._messages.clear()
                    self._unsent_bytes = 0
                    raise
                self._messages.popleft()
                self._unsent_bytes -= len(message.get("body", b""))
                if self._on_room is not None and (not self._messages or not self.is_full):
                    self._on_room()
            if until is None or until.done():
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self, _until: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PassingSink(MessageSink):
    """A sink that changes an answer, and puts it into another one, whose room counts."""

    def __init__(self, to: MessageSink) -> None:
        super().__init__()
        self._to = to

    @property
    def on_room(self) -> Callable[[], None] | None:
        """Called when the client has read what was too much."""
        return self._to.on_room

    @on_room.setter
    def on_room(self, on_room: Callable[[], None] | None) -> None:
        self._to.on_room = on_room

    @property
    def is_full(self) -> bool:
        """Whether the client has to read before more is written."""
        return self._to.is_full


class Nowhere:
    """The sink of a call without a client."""

    on_room: Callable[[], None] | None = None
    is_full: bool = False
    is_drained: bool = True

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """All of an answer."""

    def start(self, status: int, headers: Headers) -> None:
        """An answer begins."""

    def write(self, body: bytes) -> None:
        """A piece of its body."""

    def end(self, body: bytes = b"") -> None:
        """The last piece of its body."""

    async def flush(self, until: asyncio.Future[Any] | None = None) -> None:
        if until is not None:
            await until


ID: Final = "plait.id"
"""In the scope of a request whose id was asked for."""


class Client(msgspec.Struct, eq=False, kw_only=True):
    """Who has sent a request. `gone` is called when it goes, and calls `on_gone`."""

    is_gone: bool = False
    is_refused: bool = False
    """Whether the server answers the request with an error, so that its client counts as gone."""
    on_gone: Callable[[], object] | None = None

    @property
    def sink(self) -> Sink | None:
        """The sink that the server offers for the answer; None: it takes ASGI's messages only."""
        return None

    def gone(self) -> None:
        self.is_gone = True
        if self.on_gone is not None:
            self.on_gone()


class WrittenClient(Sink, Protocol):
    """A client that is the sink of its answer."""

    on_gone: Callable[[], object] | None


class WatchedReceive(msgspec.Struct, eq=False):
    """ASGI's receive of a request. The server watches its `client`; None: nobody does."""

    receive: Receive
    client: Client | None

    def __call__(self) -> Awaitable[Message]:
        return self.receive()

    def is_own(self, _send: Send) -> bool:
        """Whether what is sent so goes to this client as it is."""
        return False

    @property
    def has_answer(self) -> bool:
        """Whether an answer has begun, as far as the server says."""
        return False


def sink_of(receive: Receive, send: Send) -> Sink:
    """The sink that the server of a request offers, if `send` goes straight to its client; else one for `send`."""
    if isinstance(receive, WatchedReceive) and receive.client is not None and receive.is_own(send):
        return receive.client.sink or AsgiSink(send)
    return AsgiSink(send)


def check_client(receive: Receive) -> None:
    """Raises `ClientGoneError` if the client has gone, as far as the server says."""
    if isinstance(receive, WatchedReceive) and receive.client is not None and receive.client.is_gone:
        raise ClientGoneError


def is_refused(receive: Receive) -> bool:
    """Whether the server itself answers the request, with an error."""
    return isinstance(receive, WatchedReceive) and receive.client is not None and receive.client.is_refused


async def unless_gone(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Run `work` in this task. If the client goes, `work` is cancelled and `ClientGoneError` is raised.

    A task waits for a client whom the server does not watch: it costs as much as a tenth of the call.
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
    client.on_gone = partial(loop.call_soon, _cancel, task, client)  # what ends in this moment has ended
    try:
        return await work
    except asyncio.CancelledError:
        if client.is_gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise  # the client has not gone: the gateway is stopping
    finally:
        client.on_gone = None
        if watcher is not None:
            watcher.cancel()


def _cancel(task: asyncio.Task[Any], client: Client) -> None:
    """Cancel a task unless its work has ended since."""
    if client.on_gone is not None:
        task.cancel()


async def _watch(receive: Receive, client: Client) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    client.gone()


async def send_whole(send: Send, status: int, headers: Headers, body: bytes | bytearray) -> None:
    """Send a response with its content-length, in one piece unless it is long.

    A long one is sent as the client reads it: the connection would hold it otherwise, and what is held counts.
    """
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    for message in _in_parts(body):
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
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(min(retry_after_s, MOST_RETRY_AFTER_S)))).encode()))
    if not error.is_stored:
        headers.append(NOT_DURABLE)
    if isinstance(error, MethodNotAllowedError):
        headers.append((b"allow", b"POST"))
    if isinstance(error, NoWebSocketError):
        headers.append((b"upgrade", b"HTTP/1.1"))
    if isinstance(error, EncodingNotSupportedError):
        headers.append((b"accept-encoding", error.taken.encode()))
    if isinstance(error, SessionWaitingError):
        headers.append((b"plait-session-position", b"%d" % error.position))
    if not isinstance(error, CallerError) or error.status == 409:  # the SDK would retry these by itself
        headers.append((b"x-should-retry", b"false" if error.status == 409 else b"true"))
    return headers


def _in_parts(body: bytes | bytearray | memoryview) -> Iterator[Message]:
    """The messages of a whole body: several if it is long, so that not all of it is copied at once."""
    if len(body) <= PART_BYTES:
        yield {"type": "http.response.body", "body": bytes(body)}
        return
    view = memoryview(body)
    for begin in range(0, len(body), PART_BYTES):
        end = begin + PART_BYTES
        yield {"type": "http.response.body", "body": bytes(view[begin:end]), "more_body": end < len(body)}
