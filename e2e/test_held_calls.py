"""Calls that wait for long: what they are told on the wire, and that SDKs take no notice of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import httpx
import pytest

from e2e.sdk import asking, async_client
from e2e.server_process import NO_TLS, Server, eventually
from e2e.servers import Fleet, Launcher
from tests.waiting import WITHIN_S

Answer = TypeVar("Answer")

BUSY_TOKENS = 50_000
"""The engine is busy with the answer before for longer than a test lasts."""
LEAST_S = 10.0
"""A call that waits for so long is told so."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A gateway each of whose workers lets each tenant have one call on its engine at a time."""
    with Launcher(tmp_path_factory.mktemp("narrow")) as launch:
        engine = launch.engine("demo-1", time_scale=1)
        fleet = Fleet(launch.gateway([engine], admission={"max_running": 1}), {engine.name: engine})
        fleet.start()
        yield fleet


async def keeping_busy(gateway: Server, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> list[asyncio.Task[Answer]]:
    """A running call in each worker: with `max_running = 1` each may have one (docs/scaling.md).

    A call that waits has come to a worker that has one. Its connection is closed, and the next call has another.
    """
    running = list[asyncio.Task[Answer]]()
    runs = waits = False

    def has_come() -> bool:
        nonlocal runs, waits
        runs = gateway.metric("plait_engine_outstanding_calls") == len(running) + 1
        waits = gateway.metric("plait_waiting_calls") == 1
        return runs or waits

    while len(running) < gateway.processes:
        call = asyncio.create_task(ask())
        await asyncio.to_thread(eventually, has_come)
        if runs:
            running.append(call)
        else:
            call.cancel()
            await asyncio.to_thread(eventually, lambda: gateway.metric("plait_waiting_calls") == 0)
    return running


async def raw(fleet: Fleet, told: asyncio.Event) -> tuple[dict[str, str], str]:
    """The headers of a stream and its whole text. It is `told` once a part of the text has come."""
    async with (
        httpx.AsyncClient(base_url=fleet.gateway.url, verify=NO_TLS, timeout=WITHIN_S) as http,
        http.stream("POST", "/v1/chat/completions", json=asking("raw", stream=True)) as response,
    ):
        whole = ""
        async for text in response.aiter_text():
            whole += text
            told.set()
        return dict(response.headers), whole


async def by_openai(fleet: Fleet) -> str:
    async with async_client(fleet.gateway) as client:
        stream = await client.chat.completions.create(**asking("openai", stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def by_anthropic(fleet: Fleet) -> str:
    async with (
        anthropic.AsyncAnthropic(base_url=fleet.gateway.url, api_key="unused", max_retries=0) as client,
        client.messages.stream(
            model="demo", max_tokens=8, messages=[{"role": "user", "content": "anthropic"}]
        ) as stream,
    ):
        return await stream.get_final_text()


async def by_openai_whole(fleet: Fleet, least_s: float = LEAST_S) -> str:
    async with async_client(fleet.gateway) as client:
        answer = await client.chat.completions.with_raw_response.create(**asking("whole"))
        assert float(answer.headers.get("plait-waited-s", 0.0)) >= least_s
        return answer.parse().choices[0].message.content or ""


async def by_openai_whole_at_once(fleet: Fleet) -> str:
    return await by_openai_whole(fleet, 0.0)


async def test_a_whole_answer_that_waits_longer_than_it_may_comes_when_the_sdk_asks_again(
    tmp_path: Path,
) -> None:
    with Launcher(tmp_path) as launch:
        engine = launch.engine("demo-1", time_scale=1)
        gateway = launch.gateway([engine], admission={"max_running": 1, "hold_s": 1})
        await asyncio.to_thread(Fleet(gateway, {engine.name: engine}).start)
        async with async_client(gateway, max_retries=2) as client:
            busy = asking("busy", max_tokens=200, extra_body={"ignore_eos": True})
            first = await keeping_busy(gateway, lambda: client.chat.completions.create(**busy))
            answer = await client.chat.completions.create(**asking("patient"))
            assert answer.usage is not None
            await asyncio.gather(*first)
        assert gateway.metric("plait_refusals_total", code="waiting") >= 1


async def test_a_stream_that_waits_is_told_so_and_sdks_read_it_like_any_other(narrow: Fleet) -> None:
    async with async_client(narrow.gateway) as client:
        endless = asking("busy", max_tokens=BUSY_TOKENS, stream=True, extra_body={"ignore_eos": True})
        busy = await keeping_busy(narrow.gateway, lambda: client.chat.completions.create(**endless))
        told = asyncio.Event()
        told_so = asyncio.create_task(raw(narrow, told))
        others = [asyncio.create_task(ask(narrow)) for ask in (by_openai, by_anthropic, by_openai_whole)]
        await asyncio.to_thread(eventually, lambda: narrow.gateway.metric("plait_waiting_calls") == 1 + len(others))
        await asyncio.sleep(LEAST_S)
        await told.wait()
        for stream in await asyncio.gather(*busy):
            await stream.close()
        headers, text = await told_so
        answers = await asyncio.gather(*others)
        assert answers == [await ask(narrow) for ask in (by_openai, by_anthropic, by_openai_whole_at_once)]
    assert headers["content-type"].startswith("text/event-stream")
    assert "plait-engine" not in headers, "nothing was known of it yet"
    first, *events = text.strip().split("\n\n")
    assert first.startswith(": waiting position=")
    (ours,) = [event for event in events if event.startswith(": plait-")]
    assert "plait-engine=demo-1" in ours
    assert events[-1] == "data: [DONE]"
    assert all(answers)
