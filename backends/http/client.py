"""The gateway's HTTP/1.1 client: sends requests to one engine over a pool of keep-alive connections.

A general client, such as httpx, takes half a millisecond a request, which would be most of the gateway's cost.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

from plait.backends.errors import EngineError, EngineLostError, EngineUnreachableError
from plait.backends.http.body import Body
from plait.backends.http.connection import Connection, Response, Timeouts
from plait.backends.http.handshake import handshake_problem, speaks_tls
from plait.backends.http.host import AddressError, Host, UnreachableHostError
from plait.backends.http.trust import SYSTEM_TRUST, Trust

__all__ = ["HttpClient", "Response", "Timeouts"]

# vLLM and SGLang run on uvicorn, which closes idle connections after 5 s. Closing first avoids most stale ones.
IDLE_TTL_S = 4.0

HEADER_LINE = b"%b: %b\r\n".__mod__
"""Makes a header's line: a method of bytes, since a Python function for each header costs more."""


class HttpClient:
    """Sends requests to the engine at `url` (`http://host:port`, or https, with an optional base path).

    At most `max_idle` connections stay open between calls, each for `idle_ttl_s`. The number of busy connections has no
    limit. `trust` checks the certificate of an https engine. Errors call the engine by its `name` (default: its URL).
    A client belongs to the event loop that first uses it. Raises `ValueError` for a malformed URL, and `TrustError` for
    an https URL if there are no certificates to trust.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  (frozen)
        max_idle: int = 256,
        idle_ttl_s: float = IDLE_TTL_S,
        trust: Trust = SYSTEM_TRUST,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or not url.isascii() or "@" in parts.netloc:
            raise ValueError(f"an engine's URL is http(s)://host:port[/path] without credentials, not {url!r}")
        if parts.query or parts.fragment:
            raise ValueError(f"an engine's URL must have no query and no fragment, unlike {url!r}")
        self._url = url
        self._name = url if name is None else name
        self._host_name = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._host = Host(self._host_name, self._port)
        self._host_header = parts.netloc
        self._base_path = parts.path.rstrip("/")
        self._trust = trust if parts.scheme == "https" else None
        if self._trust is not None:
            self._trust.load()
        self._timeouts = timeouts
        self._max_idle = max_idle
        self._closed = False
        self._idle: dict[Connection, None] = {}  # a stack, the last used on top, from which any can be removed
        self._open: set[Connection] = set()
        self._all_lost = asyncio.Event()
        self._new_connection = partial(Connection, self._name, timeouts, idle_ttl_s, self)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self._host_name, self._port

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<HttpClient {self._url} open={len(self._open)} idle={len(self._idle)}{state}>"

    async def request(
        self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: Body = b""
    ) -> Response:
        """As `begin`, but returns once the response's head has arrived. Cancellation closes the connection.

        Also raises `EngineUnreachableError`, `EngineTimeoutError` or `EngineError`.
        """
        return await self.begin(method, path, headers, body).head()

    def begin(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: Body = b"") -> Response:
        """Send `body` to `path` (under the base path) and return the response at once, before any of it has arrived.

        Host, Content-Length and Accept-Encoding are added, because bodies are read as they come. Other headers are sent
        as given, so the caller leaves out hop-by-hop headers.
        If a reused connection closes before the response's first byte, the request is sent once more, on a new one.
        Raises `EngineUnreachableError` after `close`, and `ValueError` for a newline in a header.
        """
        if self._closed:
            raise EngineUnreachableError(f"engine {self._name}: the gateway has closed its connections to this engine")
        start = (
            f"{method} {self._base_path}{path} HTTP/1.1\r\nhost: {self._host_header}\r\ncontent-length: {len(body)}\r\n"
            "accept-encoding: identity\r\n"
        )
        head = b"".join((start.encode("ascii"), *map(HEADER_LINE, headers), b"\r\n"))
        if head.count(b"\n") != len(headers) + 5:
            raise ValueError(f"a request to engine {self._name} has a newline in its path or a header")
        response = Response()
        while self._idle:
            kept, _ = self._idle.popitem()
            if not kept.transport.is_closing():  # a connection leaves the pool only after it has closed
                kept.begin(response, head, body)
                return response
        self.on_stale(response, head, body)
        return response

    def close(self) -> None:
        """Closes every connection at once. New calls and responses still arriving fail."""
        self._closed = True
        for connection in list(self._open):
            connection.close()

    def retire(self) -> None:
        """Closes idle connections now, and the others as their exchanges end."""
        self._max_idle = 0
        for connection in list(self._idle):
            connection.close()

    @property
    def has_ended(self) -> bool:
        return not self._open

    def lose(self, reason: str, *, waiting_only: bool) -> None:
        """End the calls on this engine with `EngineLostError`; with `waiting_only`, only those without a byte of body.

        The client stays usable for new calls.
        """
        for connection in list(self._open):
            connection.lose(EngineLostError(f"engine {self._name} was given up: {reason}"), waiting_only=waiting_only)

    async def aclose(self) -> None:
        """`close`, and wait until the sockets are closed."""
        self.close()
        if self._open:
            await self._all_lost.wait()

    def on_idle(self, connection: Connection) -> None:
        """An exchange has ended, and its connection can carry another."""
        if len(self._idle) < self._max_idle and not self._closed:
            self._idle[connection] = None
        else:
            connection.close()

    def on_lost(self, connection: Connection) -> None:
        """A connection has closed, idle or not."""
        self._idle.pop(connection, None)
        self._open.discard(connection)
        if self._closed and not self._open:
            self._all_lost.set()

    def on_stale(self, response: Response, head: bytes, body: Body) -> None:
        """Open a new connection and send the request on it."""
        response.source = _Opening(self.connect, response, head, body)

    async def connect(self) -> Connection:
        """A new connection. Raises `EngineUnreachableError`; its `__cause__` says how each address failed."""
        try:
            connection = await self._host.connect(self._connect_to, self._timeouts.connect_s)
        except UnreachableHostError as error:
            unreachable = EngineUnreachableError(f"engine {self._name} cannot be reached")
            if error.timed_out:
                unreachable.cause = "connect_timeout"
            raise unreachable from error
        if self._closed or connection.transport.is_closing():
            connection.close()
            raise EngineUnreachableError(f"engine {self._name}: the connection closed as soon as it was open")
        self._open.add(connection)
        return connection

    async def speaks_tls(self) -> bool:
        """Whether the engine answers a TLS handshake, whatever its URL says."""
        return await speaks_tls(self._host_name, self._port, self._timeouts.connect_s)

    async def _connect_to(self, address: str) -> Connection:
        """A new connection to an address of the host. Raises `AddressError`."""
        trust = self._trust
        tls = None if trust is None else trust.context
        try:
            try:
                return await self._handshake(address, tls)
            except ssl.SSLCertVerificationError:
                if trust is None or not trust.renew(tls):
                    raise
                return await self._handshake(address, trust.context)
        except ConnectionRefusedError as error:
            raise AddressError("refused the connection") from error
        except OSError as error:
            if trust is not None and isinstance(error, ssl.SSLError | ConnectionError):
                problem = await handshake_problem(error, address, self._port, self._host_name, trust)
            else:
                problem = f"cannot be connected to: {os.strerror(error.errno) if error.errno else error}"
            raise AddressError(problem) from error

    async def _handshake(self, address: str, tls: ssl.SSLContext | None) -> Connection:
        connect, name = asyncio.get_running_loop().create_connection, None if tls is None else self._host_name
        _, connection = await connect(self._new_connection, address, self._port, ssl=tls, server_hostname=name)
        return connection


class _Opening:
    """The source of a response while its connection opens."""

    __slots__ = ("_response", "_task")

    def __init__(
        self, connect: Callable[[], Awaitable[Connection]], response: Response, head: bytes, body: Body
    ) -> None:
        self._response = response
        self._task = asyncio.create_task(self._open(connect, head, body), name="connect")

    def resume(self) -> None:
        """No effect: reading has not begun."""

    def fail(self, error: EngineError) -> None:
        self._task.cancel()
        self._response.fail(error)

    async def _open(self, connect: Callable[[], Awaitable[Connection]], head: bytes, body: Body) -> None:
        try:
            connection = await connect()
        except EngineError as error:
            self._response.fail(error)
        except Exception as defect:
            self._response.fail(EngineError(f"the connection could not be opened: {defect}"))
            raise
        else:
            connection.begin(self._response, head, body)
