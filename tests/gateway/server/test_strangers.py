"""Connections without a valid key so far, where clients need one: they make room for others, whatever they send."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from plait.gateway.app import Gateway
from plait.gateway.asgi import ON_KNOWN
from plait.gateway.config.file import parse_config
from plait.gateway.server.connection import ClientBounds, Connection
from plait.gateway.server.open_requests import OpenRequests
from tests.gateway.server.fake_connection import FakeTransport
from tests.gateway.server.serving import Running, serving
from tests.gateway.server.test_odd_clients import GET, Server
from tests.waiting import WITHIN_S

MODELS = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
KEY = b"Authorization: Bearer key\r\n"
ADMIN = b"GET /admin/engines HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer admin\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer metrics\r\n\r\n"
LAST = b"Connection: close\r\n\r\n"
OK = b"HTTP/1.1 200"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def gateway_with(connections: int, **server: Any) -> AsyncIterator[Running]:
    """A gateway whose engine does not answer."""
    engines = [{"name": "a", "url": "http://127.0.0.1:9"}]
    gateway = Gateway(parse_config({"engines": engines, "server": server}, "test"))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await gateway.app(scope, receive, send)

    async with serving(application=app, connections=connections, needs_keys=gateway.needs_keys) as running:
        yield running


async def held(running: Running, sent: bytes, count: int) -> list[Streams]:
    """So many connections on which this was sent."""
    opened = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(count)]
    for _, writer in opened:
        writer.write(sent)
    await asyncio.sleep(0.05)
    assert len(running.server.server_state.connections) == count
    return opened


async def test_who_has_a_key_is_served_beside_any_number_that_send_a_byte() -> None:
    async with gateway_with(300, api_keys=["key"]) as running:
        strangers = await held(running, b"G", 300)
        answers = [await running.ask(MODELS + KEY + LAST) for _ in range(30)]
        answers += await asyncio.gather(*(running.ask(MODELS + KEY + LAST) for _ in range(30)))
        for _, writer in strangers:
            writer.close()
    assert [answer[:12] for answer in answers] == [OK] * 60
    assert running.refused == []


async def test_without_keys_nobody_is_a_stranger() -> None:
    async with gateway_with(3, admin_key="admin") as running:
        begun = await held(running, b"G", 3)
        assert (await running.ask(MODELS + LAST)).startswith(b"HTTP/1.1 503")
        for _, writer in begun:
            writer.close()


@pytest.mark.parametrize("request_bytes", [MODELS + KEY + b"\r\n", ADMIN, METRICS])
async def test_a_connection_is_known_by_one_valid_key(request_bytes: bytes) -> None:
    keys = {"api_keys": ["key"], "admin_key": "admin", "metrics_key": "metrics"}
    async with gateway_with(4, **keys) as running:
        ((reader, writer),) = await held(running, request_bytes, 1)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(OK)
        writer.write(b"G")
        strangers = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(3)]
        for _, other in strangers:
            other.write(MODELS + b"\r\n")
        for answered, _ in strangers:
            assert b" 401 " in await answered.readuntil(b"\r\n")
        for _ in range(3):
            assert (await running.ask(MODELS + KEY + LAST)).startswith(OK)
        writer.write(request_bytes[1:])
        assert OK in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        for _, other in (*strangers, (reader, writer)):
            other.close()


async def test_only_the_requests_before_a_valid_key_have_somebody_to_tell() -> None:
    server, bounds = Server(), ClientBounds(needs_keys=lambda: True)
    connection = Connection(OpenRequests(server), bounds, server, {})
    connection.connection_made(FakeTransport())
    for count in (1, 2, 3):
        connection.data_received(GET + b"\r\n")
        await asyncio.gather(*server.tasks)
        assert len(bounds.connections.strangers) == (count < 3)
        if count == 2:
            server.scopes[1][ON_KNOWN]()
    assert [ON_KNOWN in scope for scope in server.scopes] == [True, True, False]


async def test_a_stranger_is_freed_without_the_garbage_collector() -> None:
    def left() -> set[int]:
        return {id(one) for one in gc.get_objects() if isinstance(one, Connection)}

    async with gateway_with(3, api_keys=["key"]) as running:
        gc.collect()
        gc.disable()
        try:
            others = left()  # that other tests hold
            ((_, writer),) = await held(running, b"G", 1)
            assert left() - others
            writer.close()
            async with asyncio.timeout(WITHIN_S):
                while running.server.server_state.connections:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert left() <= others
        finally:
            gc.enable()
