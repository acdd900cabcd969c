"""A connection without a socket, and the client of its one request. What was written is read as HTTP."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from plait.gateway.server.served_client import ServedClient


class FakeTransport(asyncio.Transport):
    """Keeps what it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


class FakeConnection:
    """A connection whose client reads when the test says so."""

    def __init__(self, body: bytes = b"", *, keep_alive: bool = True, version: str = "1.1") -> None:
        self.transport = FakeTransport()
        self.flow = FlowControl(self.transport)
        self.answered = 0
        self.closes_later = False
        self.cycle = RequestResponseCycle(
            scope=cast("Any", {"type": "http", "http_version": version, "method": "POST", "headers": []}),
            transport=self.transport,
            flow=self.flow,
            logger=logging.getLogger("test"),
            access_logger=logging.getLogger("test"),
            access_log=False,
            default_headers=[(b"date", b"today")],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keep_alive,
            on_response=self._on_response,
        )
        self.cycle.body += body
        self.cycle.more_body = False
        self.client = ServedClient(served=self, cycle=self.cycle)

    def close_after_request(self) -> None:
        """The request is still on its way."""
        self.closes_later = True

    def _on_response(self) -> None:
        self.answered += 1

    def pause(self) -> None:
        """The client does not read."""
        self.flow.pause_writing()
        self.client.has_no_room()

    def resume(self) -> None:
        """The client has read what was written."""
        self.flow.resume_writing()
        self.client.has_room()


class Read:
    """An answer as a client of HTTP reads it, in as much as it has come."""

    def __init__(self, written: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.has_ended = False
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(written)
        self.status = parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.has_ended = True
