"""Clients of HTTP/1.0, as nginx is by default: they get no chunks, and the end of a stream is the connection's."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from plait.gateway.asgi import sink_of
from tests.gateway.server.fake_connection import FakeConnection
from tests.gateway.server.serving import serving
from tests.waiting import WITHIN_S

EVENTS = [b"data: %d\n\n" % number for number in range(3)]
HEADS = [b"\r\n", b"Host: a\r\nConnection: keep-alive\r\n\r\n"]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Streams events: to the server's sink at /sink, else as ASGI's messages. Any other path is answered whole."""
    if scope["path"] == "/sink":
        sink = sink_of(receive, send)
        sink.start(200, [(b"content-type", b"text/event-stream")])
        for event in EVENTS:
            sink.write(event)
        sink.end()
        await sink.flush()
        return
    length = [] if scope["path"] == "/messages" else [(b"content-length", b"%d" % len(b"".join(EVENTS)))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    for event in EVENTS:
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("head", HEADS, ids=["alone", "keep-alive"])
@pytest.mark.parametrize("path", [b"/sink", b"/messages"])
async def test_a_stream_is_its_bytes_until_the_connection_closes(path: bytes, head: bytes) -> None:
    async with serving(application=app) as running:
        answer = await running.ask(b"GET %b HTTP/1.0\r\n" % path + head)
    begun, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in begun
    assert b"transfer-encoding" not in begun
    assert body == b"".join(EVENTS)


async def test_an_answer_with_a_length_keeps_it() -> None:
    async with serving(application=app) as running:
        answer = await running.ask(b"GET /whole HTTP/1.0\r\n\r\n")
    begun, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\ncontent-length: %d" % len(body) in begun
    assert body == b"".join(EVENTS)


async def test_a_stream_that_a_defect_cuts_ends_with_an_event() -> None:
    async with serving() as running:
        answer = await running.ask(b"GET /broken HTTP/1.0\r\n\r\n")
    begun, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in begun
    assert body.startswith(b'data: 1\n\ndata: {"error":')


async def test_the_head_of_a_stream_goes_out_before_its_first_bytes() -> None:
    async def waits(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    async with serving(application=waits) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("version", ["0.9", "1.0", "2.0"])
def test_only_http_1_1_has_chunks(version: str) -> None:
    made = FakeConnection(version=version)
    made.client.start(200, [])
    made.client.write(b"one")
    made.client.end(b"two")
    assert b"".join(made.transport.written).endswith(b"connection: close\r\n\r\nonetwo")
    assert not made.client.keep_alive
