"""One client's connection: HTTP/1.1 within limits, parsed by httptools, as an asyncio protocol.

The connection has three independent parts of state:

- Reading: `RequestBounds.part` is what the client sends next, with its deadline. The parser fills the reader's `latest`
  request until its body has ended.
- Serving: `_first` is the oldest request without a whole answer, at its `Stage`; pipelined requests wait behind it.
  Once it is answered, the next one is served, or the connection is idle, or it closes.
- Writing: the transport has what the client has not read. Above the high-water mark, `room` is an event to wait for.

| event | first request | behind it |
|---|---|---|
| a head | becomes it, if there is none | waits, and nothing more is read |
| its body, or the end of it | served once it is whole, or long | - |
| an answer is whole | none, or the next; the last one closes the connection | - |
| a request breaks a bound, or is no HTTP | answered with the error if it is that one, else the last one | forgotten |
| the client goes | gone | forgotten |

A request is served once all bytes that came with it are parsed. A connection is not closed while the client may still
be sending: the kernel would answer with RST, and the client would lose the answer.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from starlette.types import ASGIApp

from plait.backends.errors import CallerError, PlaitError, TooManyConnectionsError
from plait.backends.http.connection import Deadline
from plait.gateway.asgi import ON_KNOWN, UNREAD_S, OnRefused, id_of, write_error
from plait.gateway.server.balance import Share
from plait.gateway.server.request_bounds import ConnectionBounds, Header, Part, RequestBounds, RequestLimits
from plait.gateway.server.request_reader import RequestReader
from plait.gateway.server.served_request import ServedReceive, ServedRequest, Stage
from plait.gateway.server.slow_clients import Patience, SlowClients
from plait.gateway.timer import LAG_CHECK_S, LEAST_LAG_S, LoopLag

MAX_PIPELINED: Final = 8
"""The most pipelined requests that wait on a connection. Plait's clients and the SDKs send none."""

LINGER_S: Final = 1.0
"""How long a refused connection stays open after its answer. If it closed at once, bytes in transit would cause an RST,
which discards the answer."""

MAX_CONNECTIONS: Final = 10_000

IDLE_S: Final = 75.0
"""Longer than Plait's clients keep an idle connection, so that the client, not the server, closes it, unless there are
too many connections."""

UNREAD: Final = {"http_version": "1.1", "method": ""}
"""The scope of a request that could not be read."""

ASGI: Final = {"version": "3.0", "spec_version": "2.3"}


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """The limits on a client. `slow_clients`: None if no client is too slow. `share` balances between workers.

    `on_refused` is called with each error that a connection answers, and the request's scope, which has no path if no
    head was read.
    """

    limits: RequestLimits = field(default_factory=RequestLimits)
    on_refused: OnRefused = lambda _scope, _error: None
    slow_clients: SlowClients | None = None
    connections: ConnectionBounds = field(default_factory=lambda: ConnectionBounds(MAX_CONNECTIONS))
    share: Share | None = None
    idle_s: float = IDLE_S
    needs_keys: Callable[[], bool] = lambda: False
    """Whether a client's requests need a key, so that one without is a stranger (`ConnectionBounds`)."""
    lag: LoopLag = field(default_factory=LoopLag)
    """The event loop's lag, as far as it is measured."""


class Server(Protocol):
    connections: set[Any]
    """The open connections. When it stops, the server calls `shutdown` of each, and waits for their end."""

    tasks: set[asyncio.Task[None]]
    """The tasks that answer requests. The server cancels them at its end."""

    default_headers: list[Header]
    """The first headers of each answer: the date."""


class Connection(asyncio.Protocol):
    """`app` answers the requests. `may_hand_on`: whether the connection may be passed on to another worker."""

    __slots__ = (
        "_app", "_begin", "_bounds", "_deadline", "_first", "_is_counted", "_is_refused", "_is_reused", "_loop",
        "_may_hand_on", "_now_s", "_of_client", "_patience", "_reader", "_reading_paused", "_scope", "_server",
        "_waiting", "room", "transport",
    )  # fmt: skip

    def __init__(
        self, app: ASGIApp, bounds: ClientBounds, server: Server, state: dict[str, Any], *, may_hand_on: bool = True
    ) -> None:
        self._app = app
        self._begin: Callable[[ServedRequest], bool] | None = getattr(app, "begin", None)
        self._of_client = bounds
        self._server = server
        self._scope: dict[str, Any] = {"type": "http", "asgi": ASGI, "root_path": "", "state": state}  # of each request
        self._may_hand_on = may_hand_on
        self._is_counted = False
        self.transport: asyncio.Transport  # set by `connection_made`, the first event
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time()  # the time of the last bytes
        self._bounds = RequestBounds(bounds.limits, self._now_s)
        self._reader = RequestReader(self, self._bounds, self._scope)
        self._first: ServedRequest | None = None  # the oldest request without a whole answer
        self._waiting: deque[ServedRequest] = deque()
        self._is_reused = False  # at least one request was answered
        self._is_refused = False  # an error was answered: nothing more is read
        self._reading_paused = False
        self.room: asyncio.Event | None = None
        self._patience: Patience | None = None
        self._deadline = Deadline(self._loop, self._on_deadline)

    def __repr__(self) -> str:
        first = "idle" if self._first is None else self._first.stage.value
        return f"<Connection {first} waiting={len(self._waiting)} reads {self._bounds.part.value}>"

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Check the limits, or pass the connection on. asyncio and uvloop have set TCP_NODELAY."""
        self.transport = cast("asyncio.Transport", transport)
        connections, bounds, info = self._server.connections, self._of_client, transport.get_extra_info
        connections.add(self)
        self._scope["scheme"] = "https" if info("sslcontext") else "http"
        self._scope["client"], self._scope["server"] = _address(info("peername")), _address(info("sockname"))
        if bounds.slow_clients is not None:
            self._patience = Patience(bounds.slow_clients, self.transport)
        if bounds.share is not None and bounds.share.is_for_all(self.transport):
            if self._may_hand_on and bounds.share.hand_on(self.transport):
                return
            self._is_counted = True
            bounds.share.came()
        try:
            bounds.connections.check(len(connections), info("socket").fileno(), self._now_s)
        except TooManyConnectionsError as error:
            if bounds.connections.is_far_above(len(connections)):
                self.transport.abort()
            else:
                self._refuse(error)
            return
        bounds.connections.idle[self] = self._now_s
        if bounds.needs_keys():
            bounds.connections.strangers[self] = self._now_s
            self._scope[ON_KNOWN] = self.on_known
        self._look()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return  # until the connection closes
        self._of_client.connections.idle.pop(self, None)
        self._now_s = now_s = self._loop.time()
        lag = self._of_client.lag
        is_late = now_s < lag.went_on_s + LAG_CHECK_S or now_s > lag.due_s + LEAST_LAG_S
        self._scope[UNREAD_S] = _unread_s(self.transport) if is_late else 0.0
        try:
            self._reader.read(data, self._now_s)
        except PlaitError as error:
            self._refuse(error)
        try:
            self._bounds.parsed(len(data), self._now_s, begun=self._reader.in_head)
        except CallerError as error:
            self._refuse(error, of_whole=self._bounds.part is Part.NOTHING)
        self._serve()
        if self._bounds.deadline_s is None and self._first is None and not self._is_refused:
            self._rest(self._now_s)  # the body has ended after the answer
        self._look()

    def eof_received(self) -> None:
        """Do nothing, so that the transport closes: a half-closed client counts as gone, as nothing else shows that."""

    def connection_lost(self, _exc: Exception | None) -> None:
        first, self._first, self._reader.latest = self._first, None, None
        self._waiting.clear()
        try:
            if first is not None:
                first.gone()
        finally:
            self._end()

    def pause_writing(self) -> None:
        """The transport's write buffer is above the high-water mark."""
        self.room = asyncio.Event()
        if self._patience is not None:
            self._patience.start()

    def resume_writing(self) -> None:
        self._make_room()
        if self._first is not None:
            self._first.has_room()

    # Called by the server.

    def shutdown(self) -> None:
        """Close once all received requests are answered."""
        last = self._waiting[-1] if self._waiting else self._first
        if last is None:
            self.transport.close()
        else:
            last.keep_alive = False

    # Called by the application.

    def on_known(self) -> None:
        """A request has had a valid key."""
        self._of_client.connections.strangers.pop(self, None)
        self._scope.pop(ON_KNOWN, None)

    # Called by the request.

    @property
    def default_headers(self) -> list[Header]:
        return self._server.default_headers

    def resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def on_answered(self, request: ServedRequest) -> None:
        """The first request's answer is written: serve the next one, or wait for it, or close."""
        self._first, self._is_reused = None, True
        if self.transport.is_closing():
            return
        if not request.keep_alive:
            self._waiting.clear()
            if self._is_refused or not request.more_body:
                self._close()
                return
        self.resume_reading()
        now_s = self._loop.time()
        if self._waiting:
            self._first = self._waiting.popleft()
            self._loop.call_soon(self._serve)
        elif self._bounds.part is Part.BODY:
            self._bounds.answered(now_s)
        elif self._bounds.part is Part.NOTHING:
            self._rest(now_s)
        self._look()

    # Called by the reader.

    def on_request(self, request: ServedRequest) -> None:
        """A head has ended. Raises `CallerError` if too many requests wait."""
        if len(self._waiting) >= MAX_PIPELINED:
            message = f"More than {MAX_PIPELINED} requests wait on this connection."
            raise CallerError(message, code="pipelined", quotes=False)
        if self._first is None:
            self._first = request
        else:
            self._waiting.append(request)
            self.pause_reading()

    def on_whole(self, request: ServedRequest) -> None:
        if request.stage is Stage.COMPLETE and not request.keep_alive:
            self.transport.close()

    def pause_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    # Serving.

    def _serve(self) -> None:
        """Have the application answer the first request, without a task if it can. A short body is awaited before."""
        request = self._first
        if request is None or request.stage is not Stage.READ:
            return
        if self._begin is not None and request.more_body and request.is_awaited:
            return  # many clients send head and body in two packets
        request.stage = Stage.SERVED
        if self._begin is None or request.more_body or not self._begin(request):
            self.answer_in_task(request)

    def answer_in_task(self, request: ServedRequest) -> None:
        """Have the application answer the request by ASGI."""
        task = self._loop.create_task(self._run(request))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _run(self, request: ServedRequest) -> None:
        """Call the application by ASGI. If it leaves the answer unfinished, the connection is closed."""
        try:
            await self._app(request.scope, ServedReceive(request.receive, request), request.send)
        finally:
            if request.stage is not Stage.COMPLETE and not request.is_gone:
                self.transport.close()

    def _refuse(self, error: PlaitError, *, of_whole: bool = False) -> None:
        """Answer with the error, unless an answer has begun, and close the connection. Only the first error counts.

        The error is about the request that is being read, or with `of_whole`, about the last one that was read.
        """
        if self._is_refused:
            return
        self._is_refused = True
        first = self._first
        is_of_first = not self._waiting and (of_whole or self._reader.latest is first)
        self._waiting.clear()
        if first is not None:
            if first.answer_headers is not None or not is_of_first:
                first.keep_alive = False  # its own answer follows, as the connection's last one
                return
            self._first = None
            first.is_refused = True
            first.gone()
        elif self._reader.latest is not None:  # its answer was written before its body had ended
            self._close()
            return
        scope = {**UNREAD, "headers": ()} if first is None else first.scope
        self._of_client.on_refused(scope, error)
        write_error(ServedRequest(self, UNREAD, keep_alive=False), error, id_of(scope))

    # Time, room and the end.

    def _look(self) -> None:
        if self._bounds.deadline_s is not None:
            self._deadline.move_to(self._bounds.deadline_s)

    def _on_deadline(self) -> None:
        if self._is_refused or self._bounds.deadline_s is None or self.transport.is_closing():
            return
        if self._reading_paused:
            self._bounds.excuse(self._loop.time())
            self._look()
        elif (error := self._bounds.overdue()) is None or self._has_empty_lines_only:
            self.transport.abort()  # not `close`, which would wait for a client that does not read its answer
        else:
            self._refuse(error)

    @property
    def _has_empty_lines_only(self) -> bool:
        """Whether no request has begun. An error now could be taken for the answer of the client's next request."""
        is_idle = self._is_reused and self._first is None
        return is_idle and self._bounds.part is Part.HEAD and not self._reader.in_head

    def _rest(self, now_s: float) -> None:
        """All requests are answered: the connection is idle."""
        self._bounds.deadline_s = now_s + self._of_client.idle_s
        self._of_client.connections.idle[self] = now_s

    def _make_room(self) -> None:
        if self._patience is not None:
            self._patience.stop()
        if self.room is not None:
            self.room.set()
            self.room = None

    def _close(self) -> None:
        """Close after the written bytes; with `LINGER_S`, if the client may still be sending."""
        if self._is_refused and self.transport.can_write_eof():
            self.transport.write_eof()
            self._loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _end(self) -> None:
        self._make_room()
        self._deadline.cancel()
        self._server.connections.discard(self)
        self._of_client.connections.idle.pop(self, None)
        self.on_known()  # breaks a reference cycle
        if self._is_counted and self._of_client.share is not None:
            self._of_client.share.went()
        self._reader.end()
        del self._deadline  # breaks a reference cycle


def _unread_s(transport: asyncio.Transport) -> float:
    """For how long the system has had the latest bytes of a connection: `tcpi_last_data_recv` of Linux, in ms."""
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 56)
    except (AttributeError, OSError):  # another system, or another kind of socket
        return 0.0
    return int.from_bytes(info[52:56], sys.byteorder) / 1e3


def _address(address: Any) -> tuple[str, int] | None:
    """Host and port of an IPv4 or IPv6 address; None for other sockets."""
    return tuple(address[:2]) if isinstance(address, tuple) else None
