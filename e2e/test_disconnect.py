"""Clients that go away: the engine computes for nobody, and the books are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from openai import AsyncOpenAI

from e2e.sdk import asking, async_client, sync_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher

ENDLESS_TOKENS = 50_000
"""A minute of the shared engines' time."""


def endless(**fields: Any) -> dict[str, Any]:
    """A call that does not end by itself as long as a test runs."""
    return asking("Go on for ever.", **{"max_tokens": ENDLESS_TOKENS, "extra_body": {"ignore_eos": True}, **fields})


def total(engines: Iterable[Server], metric: str) -> float:
    """Over these engines."""
    return sum(engine.metric(f"plait_engine_{metric}") for engine in engines)


def check_freed(engines: Iterable[Server], aborted_before: float, calls: int) -> None:
    """All that ran has been aborted, gave back its blocks, and generates no more."""
    eventually(lambda: total(engines, "aborted_calls_total") == aborted_before + calls)
    assert total(engines, "calls_running") == total(engines, "calls_waiting") == 0
    used = total(engines, "kv_blocks") - total(engines, "kv_blocks_free") - total(engines, "kv_blocks_cached")
    assert used == 0
    assert total(engines, "output_tokens_total") == total(engines, "output_tokens_total")


def check_books(gateway: Server, gone_before: float) -> None:
    """The gateway has noticed that one client has gone."""
    eventually(lambda: gateway.metric("plait_calls_total", outcome="client_gone") == gone_before + 1)
    assert gateway.metric("plait_engine_outstanding_calls") == 0


@pytest.mark.parametrize("n", [1, 3])
def test_closing_a_stream_frees_its_call(fleet: Fleet, server: Server, n: int) -> None:
    engines = fleet.engines.values()
    aborted = total(engines, "aborted_calls_total")
    gone = fleet.gateway.metric("plait_calls_total", outcome="client_gone")
    with sync_client(server) as client:
        stream = client.chat.completions.create(**endless(stream=True, n=n))
        for _ in range(3 * n):
            next(stream)
        assert total(engines, "calls_running") == n
        stream.close()
        check_freed(engines, aborted, n)
    if server is fleet.gateway:
        check_books(server, gone)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_cancelling_a_call_frees_it(fleet: Fleet, server: Server, stream: bool) -> None:
    engines = fleet.engines.values()
    aborted = total(engines, "aborted_calls_total")
    gone = fleet.gateway.metric("plait_calls_total", outcome="client_gone")
    async with async_client(server) as client:
        call = asyncio.create_task(read_all(client, endless(stream=stream)))
        await asyncio.to_thread(eventually, lambda: total(engines, "calls_running") == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(check_freed, engines, aborted, 1)
    if server is fleet.gateway:
        await asyncio.to_thread(check_books, server, gone)


@pytest.mark.parametrize("where", ["engine", "gateway"])
async def test_a_call_that_still_waits_is_given_up_too(launch: Launcher, where: str) -> None:
    """The gateway sends an engine no more than it runs, so that a call waits in the engine only without the gateway."""
    engine = launch.engine("narrow", options=["--max-running-calls", "1"])
    gateway = launch.gateway([engine])
    Fleet(gateway, {engine.name: engine}).start()
    server, metric = (engine, "plait_engine_calls_waiting") if where == "engine" else (gateway, "plait_waiting_calls")
    async with async_client(server) as client:
        running = await client.chat.completions.create(**endless(stream=True))
        await anext(running)
        waiting = asyncio.create_task(read_all(client, endless()))
        await asyncio.to_thread(eventually, lambda: server.metric(metric) == 1)
        waiting.cancel()
        await asyncio.to_thread(eventually, lambda: server.metric(metric) == 0)
        assert engine.metric("plait_engine_calls_running") == 1
        assert (await anext(running)).choices
        await running.close()
        await asyncio.to_thread(check_freed, [engine], 1 if where == "engine" else 0, 1)


async def test_others_go_on_when_a_client_leaves(fleet: Fleet) -> None:
    async with async_client(fleet.gateway) as client:
        stays = await client.chat.completions.create(**endless(stream=True, max_tokens=300))
        leaves = await client.chat.completions.create(**endless(stream=True))
        await anext(leaves)
        await leaves.close()
        texts = [chunk.choices[0].delta.content async for chunk in stays]
    assert len(texts) == 301
    await asyncio.to_thread(eventually, lambda: total(fleet.engines.values(), "calls_running") == 0)


async def read_all(client: AsyncOpenAI, request: dict[str, Any]) -> None:
    answer = await client.chat.completions.create(**request)
    if request.get("stream"):
        async for _ in answer:
            pass
