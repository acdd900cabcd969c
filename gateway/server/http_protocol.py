"""uvicorn's HTTP protocol within bounds: a request that breaks one gets an error object of OpenAI's shape.

uvicorn reads and answers; this adds limits and replaces its plain-text answers. The head of an answer goes out with its
first bytes. A client that does not read its answer is disconnected, so that it holds no engine's place for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, cast

import httptools
import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from plait.backends.errors import CallerError, PlaitError, TooManyConnectionsError
from plait.gateway.asgi import CLIENT, error_headers, new_id
from plait.gateway.server.balance import Share
from plait.gateway.server.request_bounds import ConnectionBounds, Header, Part, RequestBounds, RequestLimits
from plait.gateway.server.served_client import (
    JOINED_BYTES,
    ServedClient,
    nothing,
    serve_without_chunks,
    takes_chunks,
)

SLOWEST_BYTES = 64 * 1024
"""A client has to take this much in each time-out while as much waits for it: uvicorn's high-water mark.

So a client that reads one byte a minute is dropped too.
"""

MAX_PIPELINED = 8
"""Requests that wait on a connection for the answer to an earlier one. Plait's clients and the SDKs send none."""

SHORT_BYTES = 16 * 1024
"""A body of so many bytes is awaited by the server. The application reads longer ones as they come, and counts them."""

LINGER_S = 1.0
"""Seconds that a refused connection stays open after its answer. If it closed at once, the bytes still under way would
make the system discard the answer."""

OnRefused = Callable[[PlaitError], None]
DEFAULT_LIMITS = RequestLimits()
MAX_CONNECTIONS = 10_000

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SlowClients:
    """Drop a client that takes less than `SLOWEST_BYTES` in `timeout_s`. `on_dropped` is told of each."""

    timeout_s: float
    on_dropped: Callable[[], None]


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with an end to its patience. It costs nothing while the client reads."""

    def __init__(self, *args: Any, slow_clients: SlowClients | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._slow_clients = slow_clients
        self._unread_bytes = 0
        self._look: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The client has not read so much that the application has to wait."""
        super().pause_writing()
        if self._slow_clients is not None:
            self._watch(self._slow_clients)

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self, slow_clients: SlowClients) -> None:
        self._forget()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._look = self.loop.call_later(slow_clients.timeout_s, self._on_time, slow_clients)

    def _on_time(self, slow_clients: SlowClients) -> None:
        if self._unread_bytes - self.transport.get_write_buffer_size() >= SLOWEST_BYTES:
            self._watch(slow_clients)
            return
        self._look = None
        log.info("slow client dropped", client=self.client and self.client[0], unread_bytes=self._unread_bytes)
        slow_clients.on_dropped()
        self.transport.abort()

    def _forget(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None


class Opening(msgspec.Struct, eq=False):
    """Stands for the transport of uvicorn's `cycle` until the first bytes of the answer. Then the cycle gets its own.

    A head that is not followed by bytes at once goes out in the next turn of the event loop.
    """

    cycle: RequestResponseCycle
    protocol: BoundedProtocol
    head: bytes = b""
    alone: asyncio.Handle | None = None  # writes the head by itself

    def write(self, data: bytes) -> None:
        """Of a transport. The first piece is the head, which is written with the second one behind it."""
        protocol, cycle, transport = self.protocol, self.cycle, self.protocol.transport
        if self.alone is None:
            self.head, self.alone = data, protocol.loop.call_soon(self.write, b"")
            return
        self.alone.cancel()
        cycle.transport = transport
        if cycle is protocol.cycle and protocol.bounds.part is Part.BODY:
            cycle.transport = cast("asyncio.Transport", Early(protocol))
        if transport.is_closing():  # the client may have gone in this turn of the event loop
            return
        if len(data) <= JOINED_BYTES:
            transport.write(self.head + data)
        else:
            transport.write(self.head)
            transport.write(data)

    def close(self) -> None:
        """Of a transport."""
        if self.alone is not None:
            self.write(b"")
        self.protocol.transport.close()

    def is_closing(self) -> bool:
        """Of a transport."""
        return self.protocol.transport.is_closing()


class Early:
    """Stands for the transport of an answer that begins before its request has ended. It is closed after the request.

    If it closed at once, the bytes still under way would make the system discard the answer. nginx asks for the close
    unless it is told to keep connections.
    """

    __slots__ = ("_protocol",)

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        """Of a transport."""
        self._protocol.transport.write(data)

    def close(self) -> None:
        """Of a transport."""
        self._protocol.close_after_request()

    def is_closing(self) -> bool:
        """Of a transport."""
        return self._protocol.transport.is_closing()


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """What a client may do. `on_refused` gets each error that is answered here. None: no client is too slow.

    A `share` hands connections on to other workers.
    """

    limits: RequestLimits = DEFAULT_LIMITS
    on_refused: OnRefused = lambda _error: None
    slow_clients: SlowClients | None = None
    connections: ConnectionBounds = field(default_factory=lambda: ConnectionBounds(MAX_CONNECTIONS))
    share: Share | None = None


ANY_CLIENT = ClientBounds()


class BoundedProtocol(PatientProtocol):
    """One client's connection."""

    def __init__(self, *arguments: Any, bounds: ClientBounds, **options: Any) -> None:
        super().__init__(*arguments, slow_clients=bounds.slow_clients, **options)
        self._connections = bounds.connections
        self._share = bounds.share
        self.may_hand_on = True
        self._is_counted = False
        self._on_refused = bounds.on_refused
        self._now_s = self.loop.time()  # when bytes came last
        self.bounds = RequestBounds(bounds.limits, self._now_s)
        self.headers = self._trailers = _Trailers(self.bounds)  # until a head begins
        self._refused = False
        self._asks_upgrade = False  # the head that was read last, which is read again without that
        self._closes = False  # when the request has ended
        self._running: RequestResponseCycle | None = None
        self._client: ServedClient | None = None  # of what runs
        self._awaited: tuple[RequestResponseCycle, Any, ServedClient] | None = None  # its body is still coming
        self._begin = getattr(self.app, "begin", None)
        self._timer: asyncio.TimerHandle | None = None
        self._looks_s = inf  # when the timer is due

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Of asyncio: a client has come."""
        super().connection_made(transport)
        if self._share is not None and self._share.is_for_all(transport):
            if self.may_hand_on and self._share.hand_on(transport):
                return
            self._is_counted = True
            self._share.came()
        descriptor = transport.get_extra_info("socket").fileno()
        try:
            self._connections.check(len(self.connections), descriptor, self._now_s)
        except TooManyConnectionsError as error:
            if self._connections.is_far_above(len(self.connections)):
                transport.abort()
            else:
                self._refuse(error)
            return
        if self.bounds.deadline_s is not None:
            self._look_at(self.bounds.deadline_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio: the client has gone."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn tells only the latest of several pipelined requests
            self._running.message_event.set()
        client, self._client, self._awaited = self._client, None, None
        try:
            if client is not None and self._running is not None and not self._running.response_complete:
                client.gone()
        finally:
            self._end(exc)

    def _end(self, exc: Exception | None) -> None:
        """Give back what the connection has."""
        if self._running is not None:
            self._running.on_response = nothing
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        if self._share is not None and self._is_counted:
            self._share.went()

    def pause_writing(self) -> None:
        """Of asyncio: the client has not read so much that no more should be written."""
        super().pause_writing()
        if self._client is not None:
            self._client.has_no_room()

    def resume_writing(self) -> None:
        """Of asyncio: the client has read most of what was written."""
        super().resume_writing()
        if self._client is not None:
            self._client.has_room()

    def data_received(self, data: bytes) -> None:
        """Of asyncio: bytes have come."""
        if self._refused:
            return  # until the connection closes
        self._now_s = self.loop.time()
        self._parse(data)
        try:
            self.bounds.parsed(len(data), self._now_s, begun=self.headers is not self._trailers)
        except CallerError as error:
            self._refuse(error, of_whole=self.bounds.part is Part.NOTHING)
        deadline_s = self.bounds.deadline_s
        if deadline_s is not None and deadline_s < self._looks_s:
            self._look_at(deadline_s)

    def _parse(self, data: bytes) -> None:
        """Have the parser read bytes.

        It stops behind a head that asks for another protocol. RFC 9110 (7.8) has a server ignore that, but a parser
        that has stopped reads no body: the head is read again as one that asks for nothing.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stop:
                if not self._asks_upgrade:  # a tunnel, which is not made: nothing behind it is a request
                    self.cycle.keep_alive = False
                    return
                self._asks_upgrade = False
                data = self._head_again() + data[stop.args[0] :]
            except httptools.HttpParserError as fault:
                self._refuse_unreadable(fault.__context__)
                return
            else:
                return

    def _head_again(self) -> bytes:
        """The head that was read last, without its request for another protocol."""
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([line, *headers, b"", b""])

    def _refuse_unreadable(self, over_limit: BaseException | None) -> None:
        """The parser has raised: because of an error in a callback (`over_limit`), or because it cannot read on."""
        if isinstance(over_limit, PlaitError):
            self._refuse(over_limit)
        else:
            self._refuse(
                CallerError("The request is not valid HTTP/1.1. Send it with an HTTP client.", code="invalid_http")
            )

    def on_headers_complete(self) -> None:
        """Of httptools."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._asks_upgrade = True
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise CallerError(f"More than {MAX_PIPELINED} requests wait on this connection.", code="pipelined")
        self.bounds.head(self.parser.get_http_version(), self.url, self.headers, self._now_s)
        super().on_headers_complete()
        self.headers = self._trailers

    def on_body(self, body: bytes) -> None:
        """Of httptools."""
        self.bounds.body_bytes += len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Of httptools."""
        self.bounds.chunk_ended()

    def on_message_complete(self) -> None:
        """Of httptools."""
        if self._asks_upgrade:
            return
        self.bounds.part = Part.NOTHING
        super().on_message_complete()
        if self._awaited is not None:
            self.loop.call_soon(self._serve, *self._awaited)
            self._awaited = None
        if self._closes:
            self.transport.close()

    def close_after_request(self) -> None:
        """Close when the client has sent the whole request, or its time for that is over."""
        if self.bounds.part is Part.BODY:
            self._closes = True
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Of uvicorn, in the place of its own: the application has answered. One timer watches over all idle times."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        if self.bounds.part is Part.BODY:
            self.bounds.answered(self.loop.time())
        elif self.bounds.part is Part.NOTHING:
            self.bounds.deadline_s = idle_until_s = self.loop.time() + self.timeout_keep_alive
            if idle_until_s < self._looks_s:
                self._look_at(idle_until_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._client = ServedClient(served=self, cycle=cycle, is_full=self.flow.write_paused)
        self.loop.call_soon(self._serve, cycle, app, self._client)  # once all of what came is parsed

    def _serve(self, cycle: RequestResponseCycle, app: Any, client: ServedClient) -> None:
        """Have the application answer: without a task if it can, once the whole request has come, if that is short."""
        if self._begin is not None and not client.is_gone:
            if cycle.more_body:
                if _is_short(cycle):  # many clients send head and body apart
                    self._awaited = cycle, app, client
                    return
            elif self._begin(cycle.scope, client):
                return
        if not takes_chunks(cycle):
            app = partial(serve_without_chunks, app, client)
        cycle.scope[CLIENT] = client  # type: ignore[typeddict-unknown-key]
        cycle.transport = Opening(cycle, self)  # type: ignore[assignment]  # all that a cycle needs of it
        super()._start_asgi_task(cycle, app)

    def _look_at(self, at_s: float) -> None:
        """Look at the deadline then. A deadline that has become later is found too early, and looked at again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._looks_s = self.loop.call_at(at_s, self._on_deadline), at_s

    def _on_deadline(self) -> None:
        self._timer, self._looks_s = None, inf
        deadline_s, now_s = self.bounds.deadline_s, self.loop.time()
        if self._refused or deadline_s is None or self.transport.is_closing():
            return
        if now_s >= deadline_s and not self.flow.read_paused:
            error = self.bounds.overdue()
            if error is None or (self._running is not None and self._running.response_complete):
                self.transport.close()
            else:
                self._refuse(error)
            return
        if now_s >= deadline_s:
            deadline_s = self.bounds.excuse(now_s)
        self._look_at(deadline_s)

    def _refuse(self, error: PlaitError, *, of_whole: bool = False) -> None:
        """Answer with the error unless an answer is under way, and close the connection. The first error counts.

        The error is that of a request that does not end, or `of_whole`: of the latest one, which has ended.
        """
        if self._refused:
            return
        self._refused = True
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            is_its_own = running is self.cycle and (of_whole or self.bounds.part is Part.BODY)
            if running.response_started or not is_its_own:
                running.keep_alive = False  # its answer is the last one
                return
            running.disconnected = True
            running.message_event.set()
        self._on_refused(error)
        self.transport.write(_response(error, self.server_state.default_headers))
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()


def _is_short(cycle: RequestResponseCycle) -> bool:
    """Whether the body that is still coming is short, and its client does not wait to be asked for it."""
    length = next((value for name, value in cycle.scope["headers"] if name == b"content-length"), b"")
    return not cycle.waiting_for_100_continue and length.isdigit() and int(length) <= SHORT_BYTES


class _Trailers(list[Header]):
    """Takes the place of uvicorn's list of headers behind the head. The application does not see trailers."""

    def __init__(self, bounds: RequestBounds) -> None:
        super().__init__()
        self.bounds = bounds

    def append(self, header: Header) -> None:
        """Count a trailer, and forget it."""
        self.bounds.trailer(*header)


def _response(error: PlaitError, default_headers: Sequence[Header]) -> bytes:
    """The last answer on a connection. It is logged."""
    request_id = new_id()
    log.info("refused", request_id=request_id, status=error.status, code=error.code, message=error.message)
    body = error.body()
    headers = [
        *default_headers,
        *error_headers(error),
        (b"x-request-id", request_id.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"%b%b\r\n%b" % (STATUS_LINE[error.status], lines, body)
