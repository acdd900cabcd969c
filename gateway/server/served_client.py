"""The client of one request, as Plait's own server offers it to the application: its body, and a sink for the answer.

The answer is written to the connection itself. ASGI's `send` of the same request still works: it takes a coroutine and
a dict for each piece, and looks at each header anew. What both change is the state of uvicorn's cycle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from plait.backends.http.client import HEADER_LINE
from plait.gateway.asgi import PART_BYTES, Client, Headers

if TYPE_CHECKING:
    import asyncio


JOINED_BYTES = 16 * 1024
"""Longer bytes are written by themselves: copying them takes longer than a system call."""


LONG_BYTES = 64 * 1024
"""A longer body is received as ASGI's messages."""


class Requests(Protocol):
    """The requests of a server."""

    stopping: bool
    """Whether each answer is the last of its connection."""


class Flow(Protocol):
    """Whether a connection takes more: uvicorn's."""

    write_paused: bool

    def resume_reading(self) -> None:
        """Read what the client sends."""

    async def drain(self) -> None:
        """Wait until the connection takes more."""


class Served(Protocol):
    """A connection of the server."""

    @property
    def transport(self) -> asyncio.Transport: ...  # noqa: D102

    @property
    def flow(self) -> Flow: ...  # noqa: D102

    def close_after_request(self) -> None:
        """Close when the client has sent the whole request."""


def nothing() -> None:
    """Takes the place of what a cycle calls at its end."""


def takes_chunks(cycle: RequestResponseCycle) -> bool:
    """Whether a body may come in chunks to the client of a request (RFC 9112, 6.1)."""
    return cycle.scope["http_version"] == "1.1"


class ServedClient(Client, eq=False):
    """One request's client. It is a `Sink`: what it is written goes to the `served` connection."""

    served: Served
    cycle: RequestResponseCycle
    requests: Requests | None = None
    on_room: Callable[[], None] | None = None
    head: bytes = b""
    """Of the answer, until it goes out with the first bytes of its body."""
    rest: memoryview | None = None
    """Of a long answer, which goes out as the client reads it."""
    is_full: bool = False
    """Whether the client has to read before more is written."""
    answer_headers: Headers | None = None

    @property
    def sink(self) -> ServedClient:
        """The client itself."""
        return self

    @property
    def is_drained(self) -> bool:
        """Whether the client has been sent all that was written."""
        return self.rest is None

    def take_body(self) -> bytes | None:
        """The body of the request; None if it has not all come, or is long."""
        cycle = self.cycle
        if cycle.more_body or len(cycle.body) > LONG_BYTES:
            return None
        body = bytes(cycle.body)
        cycle.body.clear()
        cycle.message_event.clear()
        return body

    def give_back(self, body: bytes) -> None:
        """The body is to be received as ASGI's messages all the same."""
        self.cycle.body += body
        self.cycle.message_event.set()

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """All of an answer. A long one goes out as the client reads it."""
        transport = self.served.transport
        if transport.is_closing():
            return
        head = self._begin(status, [*headers, (b"content-length", b"%d" % len(body))]) + b"\r\n"
        self.cycle.chunked_encoding = False
        if self.cycle.scope["method"] == "HEAD":
            body = b""
        if len(body) <= JOINED_BYTES:
            transport.write(head + body)
            self._complete()
        else:
            transport.write(head)
            self.rest = memoryview(body)
            self._send_rest()

    def start(self, status: int, headers: Headers) -> None:
        """An answer begins whose length is not known. Its head goes out with the first bytes of its body.

        Its body comes in chunks. HTTP/1.0 has none: there, the end of the connection ends the body.
        """
        cycle = self.cycle
        cycle.chunked_encoding = takes_chunks(cycle)
        if cycle.chunked_encoding:
            self.head = self._begin(status, headers) + b"transfer-encoding: chunked\r\n\r\n"
        else:
            cycle.keep_alive = False
            self.head = self._begin(status, headers) + b"\r\n"

    def write(self, body: bytes) -> None:
        """A piece of its body."""
        if not body or self.served.transport.is_closing():
            return
        if not self.cycle.chunked_encoding:
            begin, self.head = self.head, b""
            self.served.transport.write(begin + body)
            return
        begin, self.head = self.head + b"%x\r\n" % len(body), b""
        if len(body) <= JOINED_BYTES:
            self.served.transport.write(b"%b%b\r\n" % (begin, body))
        else:
            self.served.transport.writelines((begin, body, b"\r\n"))

    def end(self, body: bytes = b"") -> None:
        """The last piece of its body."""
        transport = self.served.transport
        if transport.is_closing():
            return
        if self.cycle.chunked_encoding:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        transport.write(self.head + body)
        self.head = b""
        self._complete()

    def send_head(self) -> None:
        """Send the head of an answer before the first bytes of its body come."""
        if not self.served.transport.is_closing():
            self.served.transport.write(self.head)
            self.head = b""

    def _begin(self, status: int, headers: Headers) -> bytes:
        """The head of an answer, without its last line."""
        cycle = self.cycle
        if self.requests is not None and self.requests.stopping:
            cycle.keep_alive = False
        given = [*cycle.default_headers, *headers]
        if not cycle.keep_alive:
            given.append((b"connection", b"close"))
        head = STATUS_LINE[status] + b"".join(map(HEADER_LINE, given))
        if head.count(b"\n") != 1 + len(given):
            raise ValueError("a header of an answer has a newline")
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.transport = self.served.transport
        self.answer_headers = headers
        return head

    def has_no_room(self) -> None:
        """The client has not read what was written."""
        self.is_full = True

    def has_room(self) -> None:
        """The client has read what was written."""
        self._send_rest()
        if self.on_room is not None and not self.is_full:
            self.on_room()

    def _send_rest(self) -> None:
        """Send what the client takes of a long answer."""
        while self.rest is not None and not self.served.flow.write_paused:
            if self.served.transport.is_closing():
                return
            piece, self.rest = self.rest[:PART_BYTES], self.rest[PART_BYTES:]
            self.served.transport.write(piece)
            if not self.rest:
                self.rest = None
                self._complete()
        self.is_full = self.rest is not None or self.served.flow.write_paused

    async def flush(self, until: asyncio.Future[Any] | None = None) -> None:
        """Wait `until` then: what is written goes out by itself."""
        if until is not None:
            await until

    def _complete(self) -> None:
        """All of the answer is written."""
        cycle = self.cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive and cycle.more_body:  # else what is under way would make the system discard the answer
            self.served.close_after_request()
        elif not cycle.keep_alive:
            cycle.transport.close()
        on_response, cycle.on_response = cycle.on_response, nothing  # else cycle and connection would hold each other
        on_response()


async def serve_without_chunks(app: ASGIApp, client: ServedClient, scope: Scope, receive: Receive, send: Send) -> None:
    """Have an application answer a client to which uvicorn would send chunks that it does not understand."""
    is_stream = False

    async def send_plain(message: Message) -> None:
        nonlocal is_stream
        if message["type"] == "http.response.start" and _has_no_length(scope, message):
            is_stream = True
            client.start(message["status"], message.get("headers", ()))
            client.send_head()
        elif not is_stream:
            await send(message)
        else:
            await client.served.flow.drain()
            (client.write if message.get("more_body", False) else client.end)(message.get("body", b""))

    await app(scope, receive, send_plain)


def _has_no_length(scope: Scope, start: Message) -> bool:
    """Whether an answer has a body whose length its head does not say."""
    names = {name.lower() for name, _ in start.get("headers", ())}
    return scope["method"] != "HEAD" and start["status"] not in {204, 304} and b"content-length" not in names
