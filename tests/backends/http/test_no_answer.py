"""Engines that cannot be reached or do not answer in time, for the HTTP client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from plait.backends.errors import EngineError, EngineTimeoutError, EngineUnreachableError
from plait.backends.http.client import HttpClient
from plait.backends.http.connection import Timeouts
from tests.backends.http.certificates import Authority, needs_openssl, trusting
from tests.backends.http.scripted_engine import (
    CHUNKED_HEAD,
    OK,
    Peer,
    always,
    answering,
    ask,
    counts,
    full_backlog,
    on_both_loops,
    serving,
    silent,
    until,
)

# Time.


@on_both_loops
async def test_an_engine_that_does_not_begin_to_answer_times_out() -> None:
    async with serving(silent, timeouts=Timeouts(first_byte_s=0.005)) as (engine, client):
        with pytest.raises(EngineTimeoutError, match=rf"{engine.url} did not begin to answer within 0\.005 s"):
            await ask(client)
        await engine.finished()


@on_both_loops
async def test_an_engine_that_sends_a_head_and_no_token_times_out() -> None:
    async with serving(answering(CHUNKED_HEAD), timeouts=Timeouts(first_byte_s=0.02)) as (engine, client):
        response = await client.request("POST", "/", [], b"")
        assert response.status == 200
        with pytest.raises(EngineTimeoutError, match=rf"{engine.url} did not begin to answer within 0\.02 s"):
            await response.read_chunk()
        await engine.finished()


@on_both_loops
async def test_an_engine_that_goes_silent_times_out_after_what_arrived() -> None:
    async with serving(answering(CHUNKED_HEAD + b"1\r\na\r\n"), timeouts=Timeouts(idle_s=0.005)) as (engine, client):
        response = await client.request("POST", "/", [], b"")
        assert await response.read_chunk() == b"a"
        with pytest.raises(EngineTimeoutError, match=rf"{engine.url} went silent for 0\.005 s"):
            await response.read_chunk()
        await engine.finished()


@on_both_loops
async def test_an_engine_that_does_not_accept_is_unreachable() -> None:
    with full_backlog() as port:
        client = HttpClient(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect_s=0.005))
        with pytest.raises(EngineUnreachableError, match=rf"127\.0\.0\.1:{port} cannot be reached") as caught:
            await ask(client)
        assert caught.value.cause == "connect_timeout"
        assert counts(client) == "open=0 idle=0"


# Failing to connect.


@on_both_loops
async def test_a_refused_connection_is_an_unreachable_engine() -> None:
    async with serving(always) as (engine, _):
        port = engine.port
    client = HttpClient(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineUnreachableError, match=f"http://127.0.0.1:{port} cannot be reached"):
        await ask(client)


@on_both_loops
async def test_an_engine_that_hangs_up_at_once_fails_the_call() -> None:
    async def unwilling(peer: Peer) -> None:
        peer.writer.transport.abort()

    async with serving(unwilling) as (engine, client):
        with pytest.raises(EngineError, match=engine.url):
            await ask(client)
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_a_host_name_that_cannot_be_one_is_an_unreachable_engine() -> None:
    with pytest.raises(EngineUnreachableError, match="cannot be reached"):
        await ask(HttpClient(f"http://{'a' * 64}.localhost:80"))


@on_both_loops
async def test_an_engine_that_speaks_no_tls_is_unreachable_over_https() -> None:
    async def plain(peer: Peer) -> None:
        await peer.reader.read(1)
        peer.send(OK)

    async with serving(plain) as (engine, _):
        client = HttpClient(f"https://127.0.0.1:{engine.port}")
        with pytest.raises(EngineUnreachableError, match="cannot be reached"):
            await ask(client)


@needs_openssl
def test_an_engine_can_be_reached_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "ca")
    server_tls, trust = authority.server(), trusting(authority.certificate, monkeypatch)

    async def scenario() -> None:
        async with serving(always, server_tls=server_tls, trust=trust) as (engine, client):
            for _ in range(2):
                assert await ask(client) == b"ok"
            assert await ask(client, bytes(1 << 20)) == b"ok"
            assert len(engine.peers) == 1

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        on_both_loops(scenario)(new_loop)
