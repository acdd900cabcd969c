"""A client on plain sockets: shows an answer as it came, and is fast enough to load a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httptools
import msgspec

from tests.waiting import WITHIN_S

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Answer:
    """An answer as it came, with the times of the request, of the body's first and latest byte, and of the end.

    `silent_s` is the longest time without a byte of the body. `broken` says how the answer broke off; it is empty if
    the answer is complete as HTTP.
    """

    began_s: float
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    first_s: float | None = None
    latest_s: float = 0.0
    silent_s: float = 0.0
    ended_s: float = 0.0
    broken: str = ""

    @property
    def time_s(self) -> float:
        """From request to end."""
        return self.ended_s - self.began_s

    def header(self, name: str) -> str | None:
        """A header's value, the first if there are several."""
        return next((value for key, value in self.headers if key == name), None)


class Client:
    """Sends requests to one server, each over an idle connection or a new one."""

    def __init__(self, port: int, timeout_s: float = WITHIN_S) -> None:
        self._port = port
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, path: str) -> Answer:
        """A GET."""
        return await self._send(f"GET {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode())

    async def delete(self, path: str) -> Answer:
        """A DELETE."""
        return await self._send(f"DELETE {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode())

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
        """A POST of a JSON body."""
        return await self._send(request("POST", path, body, headers))

    async def put(self, path: str, body: Mapping[str, Any]) -> Answer:
        """A PUT of a JSON body."""
        return await self._send(request("PUT", path, body))

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # in which they are closed

    async def _send(self, data: bytes) -> Answer:
        began_s = time.monotonic()
        while True:
            try:
                connection, is_used = await self._connection()
            except OSError as error:
                return Answer(began_s, ended_s=time.monotonic(), broken=f"no connection: {error}")
            try:
                answer = await connection.exchange(data, began_s, self._timeout_s)
            except asyncio.CancelledError:
                connection.transport.abort()
                raise
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.transport.abort()
            if not (is_used and answer.broken and not answer.status):  # the server had closed it while it was idle
                return answer

    async def _connection(self) -> tuple[Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                return connection, True
        _, made = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
        return made, False


def request(method: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request with a JSON body."""
    data = msgspec.json.encode(body)
    fields = {"host": "test", "content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time. `is_reusable` says whether it can carry another."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.is_lost = False
        self.is_reusable = False
        self._answer = Answer(0.0)
        self._pieces: list[bytes] = []
        self._done: asyncio.Future[None] | None = None

    async def exchange(self, data: bytes, began_s: float, timeout_s: float) -> Answer:
        """Send a request and return the answer."""
        self._answer, self._pieces, self.is_reusable = Answer(began_s), [], False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        except TimeoutError:
            self._answer.broken = f"no end within {timeout_s:g} s"
        self._done = None
        self._answer.body = b"".join(self._pieces)
        self._answer.ended_s = time.monotonic()
        return self._answer

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._end(f"closed: {error or 'end of file'}")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def on_status(self, _reason: bytes) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        answer, now_s = self._answer, time.monotonic()
        if answer.first_s is None:
            answer.first_s = now_s
        answer.silent_s = max(answer.silent_s, now_s - (answer.latest_s or answer.began_s))
        answer.latest_s = now_s
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_reusable = self._parser.should_keep_alive()
        self._end("")

    def _end(self, broken: str) -> None:
        if self._done is not None and not self._done.done():
            self._answer.broken = broken
            self._done.set_result(None)
