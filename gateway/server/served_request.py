"""One request of a client: its body as it comes, and its answer, written as HTTP/1.1 to the client's connection.

The connection calls a request for each piece of the body, for its end, and when the client has gone. The application
answers in one of two ways, which lead to the same stages and bytes: a call writes to the request as a `Sink`; any other
application gets ASGI's `receive` and `send`.

| stage | next | by |
|---|---|---|
| read | served | the connection: the application has the request |
| served | answering | `start`, `whole`, ASGI's `http.response.start` |
| answering | complete | `end`, the last byte of `whole`, ASGI's last `http.response.body` |

A request `is_gone` when its client cannot get the answer any more. In any stage, the rest of the answer is then
dropped. While the connection closes, an answer still begins, but its bytes are dropped.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Any, Final, Protocol

from starlette.types import Message, Scope, Send

from plait.backends.http.client import HEADER_LINE
from plait.gateway.asgi import NAME, PART_BYTES, Client, Headers, WatchedReceive

JOINED_BYTES: Final = 16 * 1024
"""Longer bytes are not joined with the head, because copying them takes longer than a system call."""

LONG_BYTES: Final = 64 * 1024
"""A longer body is always received as ASGI's messages."""

SHORT_BYTES: Final = 16 * 1024
"""The server waits for a body up to this size. The application reads longer ones as they come, and counts them."""

LINE_END: Final = b"\r\n"

CLOSE: Final = (b"connection", b"close")

CHUNKED: Final = (b"transfer-encoding", b"chunked")

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

PRINTED: Final = bytes({*range(0x20, 0x100), 0x09} - {0x7F})
"""The bytes that a header's value may have (RFC 9110, 5.5)."""

NAMED: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
"""A header's name in lower case (RFC 9110, 5.6.2)."""


_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}

STATUS_LINE: Final = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(200, 600)
}

WITHOUT_BODY: Final = frozenset((204, 304))
"""Statuses of answers that have no body."""


class Stage(Enum):
    READ = "read"
    SERVED = "served"
    ANSWERING = "answering"
    COMPLETE = "complete"


class Framing(Enum):
    """What ends the body of an answer (RFC 9112, 6.3)."""

    NO_BODY = "no body"
    LENGTH = "length"
    CHUNKS = "chunks"
    CLOSE = "close"


NEXT_MESSAGE: Final = {Stage.SERVED: "http.response.start", Stage.ANSWERING: "http.response.body"}
"""By stage: the message that an application has to send."""


class Requests(Protocol):
    stopping: bool
    """Whether each answer is the last of its connection."""


class Line(Protocol):
    """The connection of a request, as the request sees it."""

    @property
    def transport(self) -> asyncio.Transport: ...

    @property
    def room(self) -> asyncio.Event | None:
        """While the write buffer is full: an event that is set when more may be written."""

    @property
    def default_headers(self) -> Headers:
        """The first headers of each answer."""

    def resume_reading(self) -> None: ...

    def answer_in_task(self, request: ServedRequest) -> None:
        """Have the application answer the request by ASGI."""

    def on_answered(self, request: ServedRequest) -> None:
        """The whole answer of the request is written."""


class ServedRequest(Client, eq=False):
    """A request. It is the `Client` of its call, and the `Sink` of its answer."""

    line: Line
    scope: Scope
    keep_alive: bool
    """Whether the connection may stay open after the answer."""
    stage: Stage = Stage.READ
    body: bytes | bytearray = b""
    """The received part that the application has not taken."""
    more_body: bool = True
    """Whether more of the body follows."""
    is_asked: bool = False
    """Whether the application has asked for the body."""
    is_received: bool = False
    """Whether the application has received the end of the body."""
    woken: asyncio.Event | None = None
    """Wakes a waiting `receive`."""
    requests: Requests | None = None
    framing: Framing = Framing.NO_BODY
    head: bytes = b""
    """The answer's head, until it is written with the first bytes of the body."""
    left_bytes: int = 0
    """For an answer with a content-length: the bytes that ASGI's messages still owe."""
    rest: memoryview | None = None
    """The unwritten rest of a long answer, which is written as the client reads."""
    answer_headers: Headers | None = None
    """None until the answer has begun."""
    on_room: Callable[[], None] | None = None

    @property
    def sink(self) -> ServedRequest:
        return self

    @property
    def is_full(self) -> bool:
        """Whether the client has to read before more is written."""
        return self.rest is not None or self.line.room is not None

    @property
    def is_drained(self) -> bool:
        """Whether the client has been sent all that was written."""
        return self.rest is None

    # The body. The connection adds to it; a call takes it whole, any other application receives it.

    def add(self, piece: bytes) -> None:
        """Add a piece of the body."""
        if not self.body:
            self.body = piece  # not copied: the first piece is often the only one
        else:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += piece
        if self.woken is not None:
            self._wake()

    def end_body(self) -> None:
        self.more_body = False
        if self.woken is not None:
            self._wake()

    def gone(self) -> None:
        """The client has disconnected, or was refused."""
        if self.woken is not None:
            self._wake()
        super().gone()

    @property
    def is_awaited(self) -> bool:
        """Whether the rest of the body is short, and the client does not wait for `100 Continue`."""
        length = self._header(b"content-length")
        return length.isdigit() and int(length) <= SHORT_BYTES and not self._waits_to_be_asked

    def take_body(self) -> bytes | None:
        """The whole body; None if a part is missing, or the body is long."""
        if self.more_body or len(self.body) > LONG_BYTES:
            return None
        body, self.body = bytes(self.body), b""
        return body

    def give_back(self, body: bytes) -> None:
        """Undo `take_body`: the body is received as ASGI's messages after all."""
        self.body = body

    async def receive(self) -> Message:
        if self._waits_to_be_asked and not self._is_lost:
            self.line.transport.write(CONTINUE)
        self.is_asked = True
        while not (self.is_gone or self.stage is Stage.COMPLETE):
            self.line.resume_reading()
            if self.body or not (self.more_body or self.is_received):
                body, self.body, self.is_received = bytes(self.body), b"", not self.more_body
                return {"type": "http.request", "body": body, "more_body": self.more_body}
            self.woken = self.woken or asyncio.Event()
            await self.woken.wait()
        return {"type": "http.disconnect"}

    @property
    def _waits_to_be_asked(self) -> bool:
        """Whether the client sends the body only after `100 Continue` (RFC 9110, 10.1.1)."""
        is_unasked = self.more_body and not (self.is_asked or self.body) and self.answer_headers is None
        return is_unasked and self._has_chunks and self._header(b"expect").lower() == b"100-continue"

    @property
    def _has_chunks(self) -> bool:
        """Whether the client speaks HTTP/1.1: chunks (RFC 9112, 6.1) and interim answers."""
        return bool(self.scope["http_version"] == "1.1")

    def _header(self, name: bytes) -> bytes:
        return next((value for key, value in self.scope["headers"] if key == name), b"")

    def _wake(self) -> None:
        assert self.woken is not None, "whoever calls this looks first: most requests await nothing"
        self.woken.set()
        self.woken = None

    # The sink.

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Write a whole answer. A long one is written as the client reads."""
        transport = self.line.transport
        self._begin(status, [*headers, (b"content-length", b"%d" % len(body))], Framing.LENGTH)
        if self._is_lost:
            return
        if self.framing is Framing.NO_BODY:
            body = b""
        head, self.head = self.head, b""
        if len(body) <= JOINED_BYTES:
            transport.write(head + body)
            self._complete()
        else:
            transport.write(head)
            self.rest = memoryview(body)
            self._send_rest()

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer of unknown length. Its head is written with the first bytes of its body.

        The body is sent in chunks, or for HTTP/1.0 until the end of the connection.
        """
        self._begin(status, headers, Framing.CHUNKS if self._has_chunks else Framing.CLOSE)

    def write(self, body: bytes) -> None:
        if body and not self._is_lost:
            self._write(body)

    def end(self, body: bytes = b"") -> None:
        if not self._is_lost:
            self._write(body, b"0\r\n\r\n")
            self._complete()

    async def flush(self, until: asyncio.Future[Any] | None = None) -> None:
        """Wait for `until`, or until a long answer is written and there is room. The transport sends by itself."""
        if until is not None:
            await until
            return
        while self.line.room is not None and not self.is_gone:
            await self.line.room.wait()
            if self.rest is None:
                return

    def has_room(self) -> None:
        """The client has read, and the write buffer is below its low-water mark."""
        self._send_rest()
        if self.on_room is not None and (self.stage is Stage.COMPLETE or not self.is_full):
            self.on_room()

    @property
    def _is_lost(self) -> bool:
        return self.is_gone or self.line.transport.is_closing()

    def _begin(self, status: int, headers: Headers, framing: Framing) -> None:
        """Make the head of an answer. `headers` have the content-length if `framing` is `LENGTH`."""
        if framing is Framing.CLOSE or (self.requests is not None and self.requests.stopping):
            self.keep_alive = False
        given = [*self.line.default_headers, *headers]
        if CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            given.append(CLOSE)
        if status in WITHOUT_BODY or self.scope["method"] == "HEAD":
            framing = Framing.NO_BODY
        elif framing is Framing.CHUNKS:
            given.append(CHUNKED)
        head = STATUS_LINE[status] + b"".join(map(HEADER_LINE, given)) + LINE_END
        if head.translate(None, PRINTED) != LINE_END * (2 + len(given)):
            raise ValueError("a header of an answer has a newline or another control character")
        self.head, self.framing, self.stage, self.answer_headers = head, framing, Stage.ANSWERING, headers

    def _write(self, body: bytes, end: bytes = b"") -> None:
        """Write a piece of the body, after the head if that is not written yet; `end` is the last chunk."""
        begin, self.head = self.head, b""
        if self.framing is Framing.NO_BODY:
            body = b""
        if self.framing is not Framing.CHUNKS:
            end = b""
        elif body:
            begin, end = b"%b%x\r\n" % (begin, len(body)), LINE_END + end
        if len(body) > JOINED_BYTES:
            self.line.transport.writelines((begin, body, end))
        elif joined := b"%b%b%b" % (begin, body, end):
            self.line.transport.write(joined)

    def _send_rest(self) -> None:
        while self.rest is not None and self.line.room is None:
            if self._is_lost:
                return
            piece, rest = self.rest[:PART_BYTES], self.rest[PART_BYTES:]
            self.rest = rest or None
            self.line.transport.write(piece)
            if not rest:
                self._complete()

    def _complete(self) -> None:
        self.stage = Stage.COMPLETE
        if self.woken is not None:
            self._wake()
        self.line.on_answered(self)

    # ASGI's messages.

    async def send(self, message: Message) -> None:
        """ASGI's send. Raises RuntimeError for a message that is not due, or that contradicts the content-length."""
        if self.line.room is not None and not self.is_gone:
            await self.line.room.wait()
        if self.is_gone:
            return
        if message["type"] != NEXT_MESSAGE.get(self.stage):
            raise RuntimeError(f"'{message['type']}' was sent for a request that is {self.stage.value}")
        if self.stage is Stage.SERVED:
            self._begin_sent(message["status"], [(name.lower(), value) for name, value in message.get("headers", ())])
            asyncio.get_running_loop().call_soon(self._send_head)
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if self.framing is Framing.LENGTH:
            self.left_bytes -= len(body)
            if self.left_bytes < 0 or (is_last and self.left_bytes):
                raise RuntimeError("an answer is not as long as its content-length")
        (self.end if is_last else self.write)(body)

    def _send_head(self) -> None:
        if self.head and not self._is_lost:
            self._write(b"")

    def _begin_sent(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin an answer by ASGI. Its headers may have a content-length and `connection: close`."""
        if wrong := [name for name, _ in headers if not NAMED.fullmatch(name)]:
            raise RuntimeError(f"a header of an answer has a name that is none: {wrong[0]!r}")
        said = dict(headers)
        if b"close" in said.get(b"connection", b"").lower():
            self.keep_alive = False
        headers = [header for header in headers if NAME(header) not in {b"connection", b"transfer-encoding"}]
        if b"content-length" in said:
            self.left_bytes = int(said[b"content-length"])
            self._begin(status, headers, Framing.LENGTH)
        else:
            self.start(status, headers)


class ServedReceive(WatchedReceive, eq=False):
    """ASGI's receive of a request of our server."""

    client: ServedRequest

    def is_own(self, send: Send) -> bool:
        """Whether `send` is the server's own, so that no middleware changes the answer on its way."""
        return send == self.client.send

    @property
    def has_answer(self) -> bool:
        return self.client.answer_headers is not None
