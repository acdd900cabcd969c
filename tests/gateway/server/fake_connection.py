"""A connection without a socket, and the client of its one request. What was written is read as HTTP."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httptools

from plait.gateway.server.served_request import ServedRequest, Stage


class FakeTransport(asyncio.Transport):
    """Keeps what it is written."""

    def __init__(self) -> None:
        fake = SimpleNamespace(fileno=lambda: 9)
        super().__init__({"socket": fake, "peername": ("127.0.0.1", 5), "sockname": ("::1", 80, 0, 0)})
        self.written: list[bytes] = []
        self._reads = True
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def is_reading(self) -> bool:
        return self._reads

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True


class FakeConnection:
    """A connection whose client reads when the test says so."""

    def __init__(
        self, body: bytes = b"", *, keep_alive: bool = True, version: str = "1.1", method: str = "POST", **changes: Any
    ) -> None:
        self.transport = FakeTransport()
        self.room: asyncio.Event | None = None
        self.default_headers = [(b"date", b"today")]
        self.answered = 0
        scope = {"type": "http", "http_version": version, "method": method, "path": "/", "headers": []}
        self.client = ServedRequest(
            self, {**scope, **changes}, keep_alive, stage=Stage.SERVED, body=body, more_body=False
        )

    def on_answered(self, _request: ServedRequest) -> None:
        """All of an answer is written."""
        self.answered += 1

    def answer_in_task(self, _request: ServedRequest) -> None:
        raise AssertionError("nothing here needs a task")

    def resume_reading(self) -> None:
        """The client's bytes are there."""

    def pause(self) -> None:
        """The client does not read."""
        self.room = asyncio.Event()

    def resume(self) -> None:
        """The client has read what was written."""
        if self.room is not None:
            self.room.set()
            self.room = None
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
