"""Which connections of the HTTP client are used again, and what happens if such a one is stale."""

from __future__ import annotations

import asyncio
import socket

import pytest

from plait.backends.errors import EngineError
from tests.backends.http.scripted_engine import (
    OK,
    Peer,
    Script,
    always,
    answering,
    ask,
    counts,
    on_both_loops,
    serving,
    until,
)

# Reuse of connections.


@on_both_loops
async def test_sequential_calls_share_a_connection() -> None:
    async with serving(always) as (engine, client):
        for _ in range(5):
            assert await ask(client) == b"ok"
            assert counts(client) == "open=1 idle=1"
        assert len(engine.peers) == 1
        (connection,) = client._open
        tcp = connection.transport.get_extra_info("socket")
        assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@on_both_loops
async def test_the_connection_that_became_idle_last_is_reused_first() -> None:
    async with serving(always) as (engine, client):
        first, second = await asyncio.gather(
            client.request("POST", "/", [], b"1"), client.request("POST", "/", [], b"2")
        )
        assert (await first.read(), await second.read()) == (b"ok", b"ok")
        hottest = list(client._idle)[-1]
        await ask(client, b"3")
        await ask(client, b"4")
        assert list(client._idle)[-1] is hottest
        assert sorted(len(peer.requests) for peer in engine.peers) == [1, 3]


@on_both_loops
async def test_no_more_idle_connections_than_allowed_are_kept() -> None:
    async with serving(always, max_idle=2) as (_, client):
        assert await asyncio.gather(*[ask(client) for _ in range(5)]) == [b"ok"] * 5
        await until(lambda: counts(client) == "open=2 idle=2")


@on_both_loops
async def test_an_idle_connection_closes_itself_after_its_time() -> None:
    async with serving(always, idle_ttl_s=0.002) as (engine, client):
        assert await ask(client) == b"ok"
        await until(lambda: counts(client) == "open=0 idle=0")
        await engine.finished()


@on_both_loops
async def test_an_idle_connection_that_the_engine_closes_leaves_the_pool() -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        peer.send(OK)

    async with serving(once) as (engine, client):
        assert await ask(client) == b"ok"
        await until(lambda: counts(client) == "open=0 idle=0")
        assert await ask(client) == b"ok"
        assert len(engine.peers) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother",
        OK + b"H",
        OK + b"garbage",
    ],
)
async def test_a_connection_that_must_close_or_holds_leftover_bytes_is_not_reused(answer: bytes) -> None:
    async with serving(answering(answer)) as (engine, client):
        for _ in range(2):
            assert await ask(client) == b"ok"
        assert len(engine.peers) == 2
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_bytes_that_come_while_it_is_idle_close_a_connection() -> None:
    async def chatty(peer: Peer) -> None:
        await peer.request()
        peer.send(OK)
        await until(lambda: counts(client) == "open=1 idle=1")
        peer.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await peer.closed()

    async with serving(chatty) as (engine, client):
        assert await ask(client) == b"ok"
        await until(lambda: counts(client) == "open=0 idle=0")
        await engine.finished()


# Stale connections.


def closing_second(*first_bytes: bytes) -> Script:
    """The first connection answers once and closes on its second request, after these bytes; others always answer."""

    async def script(peer: Peer) -> None:
        if peer is not peer.engine.peers[0]:
            await always(peer)
        await peer.request()
        peer.send(OK)
        await peer.request()
        for piece in first_bytes:
            peer.send(piece)

    return script


@on_both_loops
async def test_a_stale_connection_is_replaced_by_a_fresh_one() -> None:
    async with serving(closing_second()) as (engine, client):
        assert await ask(client, b"1") == b"ok"
        assert await ask(client, b"2") == b"ok"
        assert [[request[-1:] for request in peer.requests] for peer in engine.peers] == [[b"1", b"2"], [b"2"]]


@on_both_loops
async def test_a_connection_that_was_reset_is_stale_too() -> None:
    async def resetting(peer: Peer) -> None:
        if peer is not peer.engine.peers[0]:
            await always(peer)
        await peer.request()
        peer.send(OK)
        await peer.head()
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.writer.transport.abort()

    async with serving(resetting) as (engine, client):
        assert await ask(client) == b"ok"
        assert await ask(client, bytes(5 << 20)) == b"ok"
        assert len(engine.peers) == 2


@on_both_loops
async def test_the_fresh_connection_is_not_replaced_again() -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        if len(peer.engine.peers) == 1:
            peer.send(OK)
            await peer.request()

    async with serving(once) as (engine, client):
        assert await ask(client) == b"ok"
        with pytest.raises(EngineError, match="without a response") as caught:
            await ask(client)
        assert type(caught.value) is EngineError
        assert len(engine.peers) == 2


@on_both_loops
async def test_a_call_whose_answer_has_begun_is_not_sent_again() -> None:
    async with serving(closing_second(b"H")) as (engine, client):
        assert await ask(client) == b"ok"
        with pytest.raises(EngineError, match="without a response"):
            await ask(client)
        assert len(engine.requests) == 2
