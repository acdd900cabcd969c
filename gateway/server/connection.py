"""One client's connection: HTTP/1.1 within bounds, parsed by httptools, for a server that accepts connections.

The connection has three sides, each with its own state:

- What the client sends next is the `Part` of its `RequestBounds`, which know how long that may take. The parser fills
  the reader's `latest` request until its body has ended.
- The first request without a whole answer is `_first`, at its `Stage`. Those that were sent behind it wait. Once it is
  answered, the next one is served, or the connection is idle, or it closes.
- What the client has not read is the transport's. Above the high-water mark there is a `room` to wait for.

| event | first request | behind it |
|---|---|---|
| a head | becomes it, if there is none | waits, and nothing more is read |
| its body, or the end of it | served once it is whole, or long | - |
| an answer is whole | none, or the next; the last one closes the connection | - |
| a request breaks a bound, or is no HTTP | answered with the error if it is that one, else the last one | forgotten |
| the client goes | gone | forgotten |

A request is served once all that has come with it was parsed. Nothing is closed while bytes of a request may be under
way: the system would discard the answer with them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from starlette.types import ASGIApp

from plait.backends.errors import CallerError, PlaitError, TooManyConnectionsError
from plait.backends.http.connection import Deadline
from plait.gateway.asgi import OnRefused, id_of, write_error
from plait.gateway.server.balance import Share
from plait.gateway.server.request_bounds import ConnectionBounds, Header, Part, RequestBounds, RequestLimits
from plait.gateway.server.request_reader import RequestReader
from plait.gateway.server.served_request import ServedReceive, ServedRequest, Stage
from plait.gateway.server.slow_clients import Patience, SlowClients

MAX_PIPELINED: Final = 8
"""Requests that wait on a connection for the answer to an earlier one. Plait's clients and the SDKs send none."""

LINGER_S: Final = 1.0
"""Seconds that a refused connection stays open after its answer. If it closed at once, the bytes still under way would
make the system discard the answer."""

MAX_CONNECTIONS: Final = 10_000

IDLE_S: Final = 75.0
"""Longer than Plait's clients keep an idle connection, so that the client, not the server, closes it."""

UNREAD: Final = {"http_version": "1.1", "method": ""}
"""The scope of a request that could not be read."""

ASGI: Final = {"version": "3.0", "spec_version": "2.3"}


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """The bounds of a client. `on_refused` gets each error that is answered here, with its request's scope, which has
    no path if no head was read. None: no client is too slow.

    A `share` hands connections on to other workers.
    """

    limits: RequestLimits = field(default_factory=RequestLimits)
    on_refused: OnRefused = lambda _scope, _error: None
    slow_clients: SlowClients | None = None
    connections: ConnectionBounds = field(default_factory=lambda: ConnectionBounds(MAX_CONNECTIONS))
    share: Share | None = None
    idle_s: float = IDLE_S


class Server(Protocol):
    connections: set[Any]
    """Those that are open. The server waits for their end, and calls `shutdown` of each before."""

    tasks: set[asyncio.Task[None]]
    """Those that answer requests. The server cancels them at its end."""

    default_headers: list[Header]
    """The first headers of each answer: the date."""


class Connection(asyncio.Protocol):
    """One client's connection. Its requests are answered by `app`; a new one `may_hand_on` itself to another worker."""

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
        self._scope: dict[str, Any] = {"type": "http", "asgi": ASGI, "root_path": "", "state": state}  # of any request
        self._may_hand_on = may_hand_on
        self._is_counted = False
        self.transport: asyncio.Transport  # from `connection_made` on, which is the first event
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time()  # when bytes came last
        self._bounds = RequestBounds(bounds.limits, self._now_s)
        self._reader = RequestReader(self, self._bounds, self._scope)
        self._first: ServedRequest | None = None  # without a whole answer
        self._waiting: deque[ServedRequest] = deque()
        self._is_reused = False  # a request has had its answer
        self._is_refused = False  # nothing more is read
        self._reading_paused = False
        self.room: asyncio.Event | None = None
        self._patience: Patience | None = None
        self._deadline = Deadline(self._loop, self._on_deadline)

    def __repr__(self) -> str:
        first = "idle" if self._first is None else self._first.stage.value
        return f"<Connection {first} waiting={len(self._waiting)} reads {self._bounds.part.value}>"

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come. asyncio and uvloop have set TCP_NODELAY."""
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
        self._look()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return  # until the connection closes
        self._now_s = self._loop.time()
        try:
            self._reader.read(data, self._now_s)
        except PlaitError as error:
            self._refuse(error)
        try:
            self._bounds.parsed(len(data), self._now_s, begun=self._reader.in_head)
        except CallerError as error:
            self._refuse(error, of_whole=self._bounds.part is Part.NOTHING)
        self._serve()
        self._look()

    def eof_received(self) -> None:
        """The client sends no more. It counts as gone, as nothing else tells that it is; the transport closes."""

    def connection_lost(self, _exc: Exception | None) -> None:
        first, self._first, self._reader.latest = self._first, None, None
        self._waiting.clear()
        try:
            if first is not None:
                first.gone()
        finally:
            self._end()

    def pause_writing(self) -> None:
        """The client has not read so much that no more should be written."""
        self.room = asyncio.Event()
        if self._patience is not None:
            self._patience.start()

    def resume_writing(self) -> None:
        self._make_room()
        if self._first is not None:
            self._first.has_room()

    # Called by the server.

    def shutdown(self) -> None:
        """Close once all requests that have come are answered."""
        last = self._waiting[-1] if self._waiting else self._first
        if last is None:
            self.transport.close()
        else:
            last.keep_alive = False

    # Called by the request.

    @property
    def default_headers(self) -> list[Header]:
        return self._server.default_headers

    def resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def on_answered(self, request: ServedRequest) -> None:
        """All of the first request's answer is written: serve the next one, or wait for it, or close."""
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
            self._bounds.deadline_s = now_s + self._of_client.idle_s
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

    # What a request comes to.

    def _serve(self) -> None:
        """Have the application answer the first request: without a task if it can, once a short one is whole."""
        request = self._first
        if request is None or request.stage is not Stage.READ:
            return
        if self._begin is not None and request.more_body and request.is_awaited:
            return  # many clients send head and body apart
        request.stage = Stage.SERVED
        if self._begin is not None and not request.more_body and self._begin(request):
            return
        task = self._loop.create_task(self._run(request))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _run(self, request: ServedRequest) -> None:
        """Have the application answer as ASGI has it. An answer that it leaves half done ends with the connection."""
        try:
            await self._app(request.scope, ServedReceive(request.receive, request), request.send)
        finally:
            if request.stage is not Stage.COMPLETE and not request.is_gone:
                self.transport.close()

    def _refuse(self, error: PlaitError, *, of_whole: bool = False) -> None:
        """Answer with the error unless an answer is under way, and close the connection. The first error counts.

        The error is that of a request that does not end, or `of_whole`: of the latest one, which has ended.
        """
        if self._is_refused:
            return
        self._is_refused = True
        first = self._first
        is_of_first = not self._waiting and (of_whole or self._reader.latest is first)
        self._waiting.clear()
        if first is not None:
            if first.answer_headers is not None or not is_of_first:
                first.keep_alive = False  # its answer is the last one
                return
            self._first = None
            first.is_refused = True
            first.gone()
        elif self._reader.latest is not None:  # which has its answer
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
            self.transport.close()
        else:
            self._refuse(error)

    @property
    def _has_empty_lines_only(self) -> bool:
        """Whether nothing of a request has come: an answer could be taken for that of the client's next request."""
        is_idle = self._is_reused and self._first is None
        return is_idle and self._bounds.part is Part.HEAD and not self._reader.in_head

    def _make_room(self) -> None:
        if self._patience is not None:
            self._patience.stop()
        if self.room is not None:
            self.room.set()
            self.room = None

    def _close(self) -> None:
        """Close behind what is written; in a while, if the client may still be sending."""
        if self._is_refused and self.transport.can_write_eof():
            self.transport.write_eof()
            self._loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _end(self) -> None:
        self._make_room()
        self._deadline.cancel()
        self._server.connections.discard(self)
        if self._is_counted and self._of_client.share is not None:
            self._of_client.share.went()
        self._reader.end()
        del self._deadline  # which holds the connection


def _address(address: Any) -> tuple[str, int] | None:
    """Host and port, of an address of IPv4 or IPv6."""
    return tuple(address[:2]) if isinstance(address, tuple) else None
