"""Calls of the HTTP client that are cancelled, aborted, or cut off when the client closes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plait.backends.errors import EngineError, EngineUnreachableError
from plait.backends.http.client import HttpClient
from tests.backends.http.scripted_engine import (
    CHUNKED,
    CHUNKED_HEAD,
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

# Giving up.


async def half(peer: Peer) -> None:
    """Answers with a stream that goes silent."""
    await peer.request()
    peer.send(CHUNKED_HEAD + b"1\r\na\r\n")
    await peer.closed()


@on_both_loops
async def test_an_aborted_response_closes_the_connection_as_the_engine_sees() -> None:
    async with serving(half) as (engine, client):
        response = await client.request("POST", "/", [], b"")
        assert await response.read_chunk() == b"a"
        response.abort()
        response.abort()
        await engine.finished()
        with pytest.raises(EngineError, match="given up"):
            await response.read_chunk()
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_aborting_a_response_that_has_arrived_whole_keeps_the_connection() -> None:
    async with serving(always) as (engine, client):
        for _ in range(2):
            response = await client.request("POST", "/", [], b"")
            await until(lambda: counts(client) == "open=1 idle=1")
            response.abort()
            assert await response.read() == b"ok"
        assert len(engine.peers) == 1


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@on_both_loops
async def test_cancelling_a_call_that_waits_for_its_answer_closes_the_connection() -> None:
    async with serving(silent) as (engine, client):
        task = asyncio.create_task(client.request("POST", "/", [], b""))
        await until(lambda: len(engine.requests) == 1)
        await cancelled(task)
        await engine.finished()
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_cancelling_a_reader_closes_the_connection() -> None:
    async with serving(half) as (engine, client):
        response = await client.request("POST", "/", [], b"")
        assert await response.read_chunk() == b"a"
        task = asyncio.create_task(response.read_chunk())
        await asyncio.sleep(0)
        await cancelled(task)
        await engine.finished()
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_cancelling_a_call_that_is_being_written_closes_the_connection() -> None:
    go = asyncio.Event()

    async def late(peer: Peer) -> None:
        await go.wait()
        await peer.closed()

    async with serving(late) as (engine, client):
        task = asyncio.create_task(client.request("POST", "/", [], bytes(32 << 20)))
        await until(lambda: counts(client) == "open=1 idle=0" and len(engine.peers) == 1)
        await cancelled(task)
        go.set()
        await engine.finished()
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_cancelling_a_call_that_connects_leaves_nothing_behind() -> None:
    with full_backlog() as port:
        client = HttpClient(f"http://127.0.0.1:{port}")
        task = asyncio.create_task(ask(client))
        await asyncio.sleep(0.002)
        await cancelled(task)
        assert counts(client) == "open=0 idle=0"


@on_both_loops
async def test_cancelling_at_any_step_releases_the_connection_exactly_once() -> None:
    async with serving(answering(CHUNKED, CHUNKED, CHUNKED)) as (_, client):
        for steps in range(25):
            task = asyncio.create_task(ask(client))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: counts(client) in {"open=0 idle=0", "open=1 idle=1"})
        assert await ask(client) == b"ok"


@on_both_loops
async def test_a_closed_client_fails_what_runs_and_refuses_what_comes() -> None:
    async with serving(half) as (engine, client):
        response = await client.request("POST", "/", [], b"")
        assert await response.read_chunk() == b"a"
        await client.aclose()
        await engine.finished()
        with pytest.raises(EngineError, match="the gateway closed its connection"):
            await response.read_chunk()
        with pytest.raises(EngineUnreachableError, match="the gateway has closed its connections"):
            await ask(client)


@on_both_loops
async def test_a_client_closed_while_a_call_connects_does_not_let_it_begin() -> None:
    async with serving(always) as (engine, client):
        task = asyncio.create_task(ask(client))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(EngineUnreachableError):
            await task
        assert engine.requests == []
