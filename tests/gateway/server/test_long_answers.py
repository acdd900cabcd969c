"""A long answer that is written at once: its client gets all of it, however slowly it reads."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from plait.gateway.asgi import ClientStage, sink_of
from tests.gateway.server.serving import serving
from tests.waiting import WITHIN_S

BODY = bytes(6 * 2**20)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Writes the body to the server's sink, or sends it through a stage."""
    sink = sink_of(receive, send)
    if scope["path"] == "/sink":
        sink.whole(200, [], BODY)
        await sink.flush()
        return
    stage = ClientStage(sink)
    await stage.send({"type": "http.response.start", "status": 200, "headers": []})
    await stage.send({"type": "http.response.body", "body": BODY})


@pytest.mark.parametrize("path", [b"/sink", b"/stage"])
async def test_a_slow_reader_gets_all_of_it(path: bytes) -> None:
    async with serving(application=app) as running, asyncio.timeout(WITHIN_S):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        slow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", running.port))
        reader, writer = await asyncio.open_connection(sock=slow, limit=65_536)
        writer.write(b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % path)
        head = await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.05)
        assert b"content-length: %d" % len(BODY) in head
        assert len(await reader.read()) == len(BODY)
        writer.close()
        await writer.wait_closed()
