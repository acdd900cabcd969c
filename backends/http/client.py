"""The data path's HTTP/1.1 client: posts a call to one engine over a pool of kept-alive connections.

Control traffic (probes, polling) uses httpx. Here httpx's half millisecond a request would be most of the gateway's
cost.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from plait.backends.errors import EngineUnreachableError
from plait.backends.http.connection import Connection, StaleConnectionError, Timeouts
from plait.backends.http.response import Response

__all__ = ["HttpClient", "Response", "Timeouts"]

# uvicorn, under vLLM and SGLang alike, closes idle connections after 5 s: closing first avoids most stale ones.
IDLE_TTL_S = 4.0


class HttpClient:
    """Posts to the engine at `url` (`http://host:port`, or https, with an optional base path).

    At most `max_idle` connections are kept between calls, each for `idle_ttl_s`. The number of busy ones is not limited
    here. `tls` replaces the system's trust for an https engine. A client belongs to the event loop that first uses it.
    Raises `ValueError` for any other URL.
    """

    def __init__(
        self,
        url: str,
        *,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  (frozen)
        max_idle: int = 256,
        idle_ttl_s: float = IDLE_TTL_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or not url.isascii() or "@" in parts.netloc:
            raise ValueError(f"an engine's URL is http(s)://host:port[/path] without credentials, not {url!r}")
        if parts.query or parts.fragment:
            raise ValueError(f"an engine's URL has neither query nor fragment, unlike {url!r}")
        self._url = url
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._host_header = parts.netloc
        self._base_path = parts.path.rstrip("/")
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._timeouts = timeouts
        self._max_idle = max_idle
        self._closed = False
        self._idle: dict[Connection, None] = {}  # a stack that any member can leave: the hottest is reused first
        self._open: set[Connection] = set()
        self._all_lost = asyncio.Event()
        self._new_connection = partial(Connection, url, timeouts, idle_ttl_s, self)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<HttpClient {self._url} open={len(self._open)} idle={len(self._idle)}{state}>"

    async def post(self, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Response:
        """Sends `body` to `path` (from the base path on) and returns the response once its head has arrived.

        Host and Content-Length are added. Other headers go out as given, so the caller leaves out hop-by-hop headers.
        If a kept-alive connection closes before a byte of the response, a fresh one replaces it once.
        Raises `EngineUnreachableError`, `EngineTimeoutError` or `EngineError`; `ValueError` for a newline in a header.
        Cancelling it closes the connection it uses.
        """
        if self._closed:
            raise EngineUnreachableError(f"engine {self._url}: the gateway has closed its connections to this engine")
        head = self._head(path, headers, len(body))
        kept = self._take()
        if kept is not None:
            try:
                return await kept.exchange(head, body)
            except StaleConnectionError:
                pass  # the engine has just restarted or closed the idle connection: the call has not failed yet
        fresh = await self._connect()
        return await fresh.exchange(head, body)

    def close(self) -> None:
        """Closes every connection at once. No call can begin any more, and responses still arriving fail."""
        self._closed = True
        for connection in list(self._open):
            connection.close()

    async def aclose(self) -> None:
        """As `close`, and returns when the event loop has let go of the sockets."""
        self.close()
        if self._open:
            await self._all_lost.wait()

    def on_idle(self, connection: Connection) -> None:
        """A connection's exchange has ended and it can carry another."""
        if len(self._idle) < self._max_idle and not self._closed:
            self._idle[connection] = None
        else:
            connection.close()

    def on_lost(self, connection: Connection) -> None:
        """A connection has closed, perhaps while it lay idle."""
        self._idle.pop(connection, None)
        self._open.discard(connection)
        if self._closed and not self._open:
            self._all_lost.set()

    def _head(self, path: str, headers: Sequence[tuple[bytes, bytes]], body_bytes: int) -> bytes:
        start = f"POST {self._base_path}{path} HTTP/1.1\r\nhost: {self._host_header}\r\n"
        lines = [b"%b: %b\r\n" % header for header in headers]
        head = b"%bcontent-length: %d\r\n%b\r\n" % (start.encode("ascii"), body_bytes, b"".join(lines))
        if head.count(b"\n") != len(headers) + 4:
            raise ValueError(f"a newline in the path or a header of a request to engine {self._url}")
        return head

    def _take(self) -> Connection | None:
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.usable:  # a closing connection may still be in the pool
                return connection
        return None

    async def _connect(self) -> Connection:
        connect = asyncio.get_running_loop().create_connection
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                _, connection = await connect(self._new_connection, self._host, self._port, ssl=self._tls)
        except (OSError, UnicodeError) as error:  # refused, unresolved, not TLS, too late; an invalid host name
            reason = str(error) or f"no connection within {self._timeouts.connect_s:g} s"
            raise EngineUnreachableError(f"engine {self._url} cannot be reached: {reason}") from error
        if self._closed or not connection.usable:
            connection.close()
            raise EngineUnreachableError(f"engine {self._url}: the connection was closed as soon as it was open")
        self._open.add(connection)
        return connection
