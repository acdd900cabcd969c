"""The real server over sockets, with a tiny application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.backends.errors import PlaitError
from plait.backends.protocol.api_errors import COMPLETION_ERRORS, ApiErrors
from plait.gateway.asgi import ClientGoneError, send_whole, unless_gone
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.server.connection import ClientBounds
from plait.gateway.server.http_server import new_config
from plait.gateway.server.open_requests import OpenRequests
from plait.gateway.server.request_bounds import ConnectionBounds, RequestLimits
from tests.waiting import WITHIN_S

LIMITS = RequestLimits(max_headers=8, max_header_bytes=2_000, header_timeout_s=30.0, body_timeout_s=30.0)
"""A pause of a busy test is no slow client."""

IMPATIENT = replace(LIMITS, header_timeout_s=0.2, body_timeout_s=0.2)
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"

BODIES = OpenBodies(10_000, 2**30)

HAPPENED: dict[str, asyncio.Event] = {}
"""What the application has seen at /watched."""


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Echoes the body, fails at /defect, streams without an end at /stream, waits at /wait and /watched."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/defect":
        raise KeyError("a defect")
    if scope["path"] == "/wait":
        await asyncio.sleep(60)
    if scope["path"] == "/headers":
        await BODIES.open(scope, "").read(receive, scope["headers"])
        await send_whole(send, 200, [], b" ".join(name for name, _ in scope["headers"]))
        return
    if scope["path"] == "/watched":
        HAPPENED["running"].set()
        try:
            await unless_gone(receive, asyncio.Event().wait())
        except ClientGoneError:
            HAPPENED["gone"].set()
        return
    if scope["path"] in ("/stream", "/broken"):
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if scope["path"] == "/broken":
            raise KeyError("a defect")
        await asyncio.sleep(60)
    try:
        body = await BODIES.open(scope, "").read(receive, scope["headers"])
    except ClientGoneError:
        return
    await send_whole(send, 200, [], body or scope["path"].encode())


@dataclass
class Running:
    server: uvicorn.Server
    port: int
    refused: list[PlaitError]
    requests: OpenRequests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ask(self, *pieces: bytes, pause_s: float = 0.0) -> bytes:
        """All that comes back for these bytes until the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(pause_s)
            return await asyncio.wait_for(reader.read(), WITHIN_S)
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    limits: RequestLimits = LIMITS,
    grace_s: int = 1,
    keep_alive_s: float = 5.0,
    application: ASGIApp = app,
    *,
    connections: int = 3,
    needs_keys: Callable[[], bool] = lambda: False,
    errors_of: Callable[[str], ApiErrors] = lambda _path: COMPLETION_ERRORS,
) -> AsyncIterator[Running]:
    refused: list[PlaitError] = []
    bounds = ClientBounds(
        limits,
        lambda _scope, error: refused.append(error),
        connections=ConnectionBounds(connections),
        idle_s=keep_alive_s,
        needs_keys=needs_keys,
    )
    options: dict[str, Any] = {"port": 0, "lifespan": "off", "timeout_graceful_shutdown": grace_s}
    requests = application if isinstance(application, OpenRequests) else OpenRequests(application, errors_of=errors_of)
    server = uvicorn.Server(new_config(requests, bounds, **options))
    task = asyncio.create_task(server._serve())  # `serve` would take the signals of the test run
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    try:
        yield Running(server, server.servers[0].sockets[0].getsockname()[1], refused, requests)
    finally:
        server.should_exit = True
        await task
