"""A client that goes away: its call leaves the engine's scheduler, whatever state it was in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from e2e.real_engines.engine import KV_TOKENS, MAX_RUNNING_CALLS, MODEL, EngineKind
from e2e.real_engines.fleet import EngineFleet
from e2e.sdk import async_client
from e2e.server_process import eventually
from e2e.tiny_model import CONTEXT_TOKENS
from tests.waiting import WITHIN_S


def endless(prompt_tokens: int = 100, first_token: int = 11, **fields: Any) -> dict[str, Any]:
    """A completion that lasts for a minute or more."""
    prompt = [first_token, *range(10, 9 + prompt_tokens)]
    output_tokens = CONTEXT_TOKENS - prompt_tokens
    return {"model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "extra_body": {"ignore_eos": True}, **fields}


def queues(fleet: EngineFleet) -> tuple[int, int]:
    """Running and waiting calls of all engines, as their schedulers have them."""
    states = [engine.cache_state().queue for engine in fleet.engines.values()]
    return sum(queue.running for queue in states), sum(queue.waiting for queue in states)


def check_left(fleet: EngineFleet) -> None:
    """Nothing runs, and no call holds a KV block."""
    eventually(lambda: queues(fleet) == (0, 0))
    for engine in fleet.engines.values():
        kv = engine.cache_state().kv
        assert kv.free_blocks + kv.cached_blocks == kv.total_blocks


async def read_all(client: AsyncOpenAI, request: dict[str, Any]) -> None:
    answer = await client.completions.create(**request)
    if request.get("stream"):
        async for _ in answer:
            pass


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_running_call_is_aborted(fleet: EngineFleet, stream: bool) -> None:
    async with async_client(fleet.gateway, timeout=WITHIN_S) as client:
        call = asyncio.create_task(read_all(client, endless(stream=stream)))
        await asyncio.to_thread(eventually, lambda: queues(fleet) == (1, 0))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(check_left, fleet)
    assert fleet.gateway.metric("plait_engine_outstanding_calls") == 0


async def test_a_call_that_waits_for_a_place_is_aborted(fleet: EngineFleet) -> None:
    """As many calls as an engine runs decode, one more waits and gives up."""
    engine = fleet.engines["engine-1"]
    async with async_client(engine, timeout=WITHIN_S) as client:

        def send(number: int) -> asyncio.Task[None]:
            request = endless(50, 21 + number, stream=True, max_tokens=400)
            return asyncio.create_task(read_all(client, request))

        calls = [send(number) for number in range(MAX_RUNNING_CALLS)]
        await asyncio.to_thread(eventually, lambda: engine.outstanding_calls() == MAX_RUNNING_CALLS)
        calls.append(send(MAX_RUNNING_CALLS))
        await asyncio.to_thread(eventually, lambda: engine.outstanding_calls() == MAX_RUNNING_CALLS + 1)
        assert engine.cache_state().queue.waiting > 0
        calls[-1].cancel()
        await asyncio.to_thread(eventually, lambda: engine.outstanding_calls() == MAX_RUNNING_CALLS)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.to_thread(check_left, fleet)


async def test_a_call_that_waits_for_kv_blocks_is_aborted(fleet: EngineFleet, kind: EngineKind) -> None:
    """Long calls fill an engine's KV cache, one more waits for it and gives up."""
    output_tokens = 280
    others = output_tokens + 2 * kind.block_tokens  # SGLang counts a page more
    n_fit = -(-KV_TOKENS // (kind.long_tokens + others))
    prompt_tokens = KV_TOKENS // n_fit - others
    engine = fleet.engines["engine-1"]
    async with async_client(engine, timeout=WITHIN_S) as client:

        def send(number: int) -> asyncio.Task[None]:
            request = endless(prompt_tokens, 21 + number, stream=True, max_tokens=output_tokens)
            return asyncio.create_task(read_all(client, request))

        calls = [send(number) for number in range(n_fit + 1)]
        await asyncio.to_thread(eventually, lambda: engine.outstanding_calls() == n_fit + 1)
        await asyncio.to_thread(eventually, lambda: engine.cache_state().queue.running == n_fit)
        assert engine.cache_state().queue.waiting == 1
        calls[-1].cancel()
        await asyncio.to_thread(eventually, lambda: engine.cache_state().queue.waiting == 0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.to_thread(check_left, fleet)
