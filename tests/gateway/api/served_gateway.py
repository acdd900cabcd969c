"""A gateway on a port, in the process of the test, before engines that answer what the test tells them to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import uvicorn

from plait.gateway.app import Gateway
from plait.gateway.config.file import parse_config
from plait.gateway.server.connection import ClientBounds
from plait.gateway.server.http_server import new_config
from plait.gateway.server.request_bounds import RequestLimits
from tests.gateway.exposed import samples
from tests.waiting import WITHIN_S

CHAT = "/v1/chat/completions"
SECRET = "the words of a prompt"
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": SECRET}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
}
LIMITS = RequestLimits()  # so long that a test that pauses on a busy machine is no slow client
IMPATIENT = RequestLimits(body_timeout_s=0.3)
EngineAnswer = tuple[int, dict[str, Any] | bytes] | bytes
"""A status with a body, which is JSON or the events of a stream; or all bytes of an answer."""


class Served:
    """A gateway on a port, with engines, which say nothing while the `answer` is None.

    `answers` has those of engines that answer otherwise.
    """

    def __init__(self) -> None:
        self.answer: EngineAnswer | None = (200, ANSWER)
        self.answers: dict[str, EngineAnswer] = {}
        self.asked = asyncio.Event()
        self.gateway: Gateway
        self.port = 0

    async def engine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(lengths[0].split(b":")[1]))
            self.asked.set()
            answer = self.answers.get(name, self.answer)
            if answer is None:
                await reader.read()
            elif isinstance(answer, bytes):
                writer.write(answer)
            else:
                status, fields = answer
                kind, body = b"text/event-stream", fields
                if not isinstance(body, bytes):
                    kind, body = b"application/json", json.dumps(fields).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-type: %b\r\n" % (status, kind))
                writer.write(b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        finally:  # a test may end before the gateway has let go of this connection
            writer.close()

    async def send(self, data: bytes, *, answered: bool = True) -> bytes:
        """Send a request on a connection of its own. Without `answered`, the client goes once it is under way."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            if answered:
                return await asyncio.wait_for(reader.read(), WITHIN_S)
            await asyncio.sleep(0.1)
            return b""
        finally:
            writer.close()

    async def head(self, data: bytes) -> bytes:
        """The head of the answer to a request, whose connection may stay open."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        finally:
            writer.close()

    @property
    def counted(self) -> int:
        found = samples(self.gateway.kernel.registry)
        return round(sum(count for name, count in found.items() if name.startswith("plait_tenant_calls_total{")))

    @property
    def refusals(self) -> list[str]:
        found = samples(self.gateway.kernel.registry)
        return [
            name
            for name, count in found.items()
            if name.startswith("plait_refusals_total{")
            for _ in range(round(count))
        ]


@asynccontextmanager
async def serving(*engines: str, limits: RequestLimits = LIMITS, **sections: Any) -> AsyncIterator[Served]:
    """A gateway before these engines, or one. `sections` replace those of its configuration."""
    made, names = Served(), engines or ("a",)
    servers = [await asyncio.start_server(partial(made.engine, name=name), "127.0.0.1", 0) for name in names]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    given: dict[str, Any] = {
        "engines": [{"name": name, "url": f"http://127.0.0.1:{port}"} for name, port in zip(names, ports, strict=True)],
        "server": {"api_keys": ["one"], "max_body_bytes": 100_000},
        "sessions": {"gone_grace_s": 0.0},
    }
    made.gateway = gateway = Gateway(parse_config({**given, **sections}, "test"))
    for name in names:
        gateway.kernel.router.health.answered(name, {"m": None})
    bounds = ClientBounds(limits, gateway.kernel.refusals.unread)
    server = uvicorn.Server(new_config(gateway.app, bounds, port=0, lifespan="off", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server._serve())  # `serve` would take the signals of the test run
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    made.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.should_exit = True
        await task
        for engine in servers:
            engine.close()


def request(
    fields: dict[str, Any] | bytes | None = None,
    *headers: str,
    method: str = "POST",
    path: str = CHAT,
    key: str = "one",
    length: int | None = None,
) -> bytes:
    """A request with these fields beside the usual ones, or with this body, perhaps of another length than it says."""
    given = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
    body = fields if isinstance(fields, bytes) else json.dumps({**given, **(fields or {})}).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"authorization: Bearer {key}", *headers]
    lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Reply(NamedTuple):
    """An answer of the gateway. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, data: bytes) -> Self:
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        headers = {name.lower(): value for name, _, value in pairs}
        if headers.get("transfer-encoding") == "chunked":
            body = _joined(body)
        return cls(int(first.split()[1]), headers, body)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def _joined(chunks: bytes) -> bytes:
    body = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        body, chunks = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body
