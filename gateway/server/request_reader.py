"""Parses the requests of one connection with httptools, within the limits of `RequestBounds`."""

from __future__ import annotations

from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools

from plait.backends.errors import CallerError, PlaitError
from plait.gateway.server.request_bounds import Header, Part, RequestBounds
from plait.gateway.server.served_request import Line, ServedRequest, Stage

HIGH_WATER_BYTES: Final = 64 * 1024
"""Backpressure: reading is paused while more of a body than this waits for the application."""


class Reading(Line, Protocol):
    """The connection, as its reader sees it."""

    def on_request(self, request: ServedRequest) -> None:
        """A head has ended. Raises `CallerError` if too many requests wait."""

    def pause_reading(self) -> None: ...

    def on_whole(self, request: ServedRequest) -> None:
        """The body of a request has ended."""


class RequestReader:
    """The parser of one `connection`. `scope` has what is the same in the ASGI scopes of all its requests."""

    __slots__ = (
        "_asks_upgrade", "_bounds", "_connection", "_headers", "_now_s", "_parser", "_scope", "_url", "in_head",
        "latest",
    )  # fmt: skip

    def __init__(self, connection: Reading, bounds: RequestBounds, scope: dict[str, Any]) -> None:
        self._bounds = bounds
        self._scope = scope
        self.latest: ServedRequest | None = None  # the request whose body is being read
        self._connection = connection
        self._parser = httptools.HttpRequestParser(self)
        self._now_s = 0.0
        self.in_head = False
        self._url = b""  # of the last head, as `_headers`
        self._headers: list[Header] = []
        self._asks_upgrade = False  # the last head asks for an upgrade

    def read(self, data: bytes, now_s: float) -> None:
        """Parse bytes. Raises `PlaitError` for a request that exceeds a limit, or is no HTTP.

        The parser stops after a head with `Upgrade`. A server should ignore the header (RFC 9110, 7.8), but the stopped
        parser would read no body. So the head is parsed again without it.
        """
        self._now_s = now_s
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as stop:
                if not self._asks_upgrade:  # CONNECT, which is refused; the bytes behind it are no requests
                    if self.in_head:  # the target is no URL
                        raise _no_http() from None
                    return
                self._asks_upgrade = False
                data = self._head_again() + data[stop.args[0] :]
            except httptools.HttpParserError as fault:
                over_limit = fault.__context__  # an error that a callback below has raised, or None
                raise over_limit if isinstance(over_limit, PlaitError) else _no_http() from None
            else:
                return

    def end(self) -> None:
        """Break the reference cycles with the parser and the connection."""
        del self._parser, self._connection

    # Called by the parser.

    def on_message_begin(self) -> None:
        self.in_head, self._url, self._headers = True, b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for headers and for trailers, which are counted and discarded."""
        if self.in_head:
            self._headers.append((name.lower(), value))
        else:
            self._bounds.trailer(name, value)

    def on_headers_complete(self) -> None:
        parser, method = self._parser, self._parser.get_method()
        is_tunnel = method == b"CONNECT"
        if parser.should_upgrade() and not is_tunnel:
            self._asks_upgrade = True
            return
        version = parser.get_http_version()
        self._bounds.head(version, self._url, self._headers, self._now_s)
        keep_alive = version != "1.0" and not is_tunnel and parser.should_keep_alive()
        request = self.latest = ServedRequest(self._connection, self._scope_of(method, version), keep_alive)
        self.in_head = False
        self._connection.on_request(request)

    def on_body(self, body: bytes) -> None:
        self._bounds.body_bytes += len(body)
        latest = self.latest
        if latest is not None and latest.stage is not Stage.COMPLETE:
            latest.add(body)
            if len(latest.body) > HIGH_WATER_BYTES:
                self._connection.pause_reading()

    def on_chunk_complete(self) -> None:
        self._bounds.chunk_ended()

    def on_message_complete(self) -> None:
        latest, self.latest = self.latest, None
        if latest is None:  # a head with `Upgrade`, which is parsed again
            return
        self._bounds.part = Part.NOTHING
        latest.end_body()
        self._connection.on_whole(latest)

    # Heads.

    def _head_again(self) -> bytes:
        """The last head without `Upgrade`."""
        line = b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, self._parser.get_http_version().encode())
        headers = [b"%b: %b" % header for header in self._headers if header[0] != b"upgrade"]
        return b"\r\n".join([line, *headers, b"", b""])

    def _scope_of(self, method: bytes, version: str) -> dict[str, Any]:
        """The ASGI scope. The target may be an absolute URL, which need not have a path (RFC 9112, 3.2.2)."""
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        return {
            **self._scope,
            "http_version": version,
            "method": method.decode("ascii"),
            "path": unquote(raw_path.decode("ascii")),
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": self._scope["state"].copy(),
        }


def _no_http() -> CallerError:
    return CallerError(
        "The request is not valid HTTP/1.1. Send it with an HTTP client.", code="invalid_http", quotes=False
    )
