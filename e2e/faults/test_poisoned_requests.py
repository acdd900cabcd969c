"""Requests that every engine fails alike: no engine is at fault, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from e2e.faults.fleet import engines_of_demo
from e2e.faults.raw_client import CHAT, Client
from e2e.faults.verdicts import is_good
from e2e.sdk import sync_client

POISONED: Final = 200 if "PLAIT_NIGHTLY" in os.environ else 40
EVERY_S: Final = 0.2
WORKERS: Final = 8
MARKER: Final = "poison"


def _body(text: str) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8}


async def _poison(client: Client) -> list[int]:
    """The statuses of poisoned calls, each with another body, five a second."""
    begun_s, calls = time.monotonic(), []
    for number in range(POISONED):
        await asyncio.sleep(begun_s + number * EVERY_S - time.monotonic())
        calls.append(asyncio.create_task(client.post(CHAT, _body(f"{MARKER} {number}"))))
    return [answer.status for answer in await asyncio.gather(*calls)]


async def _work(client: Client, worker: int, done: asyncio.Event) -> list[bool]:
    """Whether each of a worker's calls got a good answer."""
    good: list[bool] = []
    while not done.is_set():
        body = _body(f"Question {len(good)} of {worker}?")
        good.append(is_good(body, await client.post(CHAT, body)))
    return good


@pytest.mark.parametrize(("mode", "each"), [("status_500_vllm", 2), ("refuses_501_openai", 1)])
async def test_nobody_pays_for_requests_that_every_engine_fails(tmp_path: Path, mode: str, each: int) -> None:
    with engines_of_demo(tmp_path, "abcd", "--first-s", "0.05") as (gateway, engines):
        for engine in engines:
            await engine.set_mode(mode, marker=MARKER)
        done = asyncio.Event()
        async with Client(gateway.port) as client:
            workers = [asyncio.create_task(_work(client, worker, done)) for worker in range(WORKERS)]
            await asyncio.sleep(1.0)
            statuses = await _poison(client)
            done.set()
            good = [one for worker in await asyncio.gather(*workers) for one in worker]
        hits = [(await engine.stats())["hits"] for engine in engines]
        assert good.count(False) == 0
        assert len(good) > POISONED
        assert set(statuses) == {int(mode.split("_")[1])}
        assert sum(hits) <= each * POISONED
        assert "engine ejected" not in gateway.log()


async def test_an_sdk_does_not_try_again_what_every_engine_fails(tmp_path: Path) -> None:
    with engines_of_demo(tmp_path, "abcd") as (gateway, engines):
        for engine in engines:
            await engine.set_mode("status_500_json", marker=MARKER)
        async with Client(gateway.port) as client:
            for number in range(8):
                assert (await client.post(CHAT, _body(f"Question {number}?"))).status == 200
        messages: Any = [{"role": "user", "content": f"{MARKER}!"}]
        with sync_client(gateway) as sdk:
            asked = sdk.with_options(max_retries=2).chat.completions
            with pytest.raises(openai.InternalServerError):
                await asyncio.to_thread(lambda: asked.create(model="demo", messages=messages))
        assert sum([(await engine.stats())["hits"] for engine in engines]) == 2


AT_ONCE: Final = 16
CALLS: Final = 48
FAILING: Final = ("html_as_json", "empty_object", "finish_abort", "error_as_200", "status_500_vllm")


async def _changes(client: Client) -> float:
    """How often the engines' health has changed."""
    lines = (await client.get("/metrics")).body.splitlines()
    return sum(
        float(line.rsplit(b" ", 1)[1]) for line in lines if line.startswith(b"plait_engine_health_changes_total")
    )


@pytest.mark.parametrize("bodies", [1, CALLS])
@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("mode", FAILING if "PLAIT_NIGHTLY" in os.environ else FAILING[:1])
async def test_bad_calls_beside_as_many_good_ones_change_no_health(
    tmp_path: Path, mode: str, names: str, bodies: int
) -> None:
    with engines_of_demo(tmp_path, names, "--first-s", "0.05") as (gateway, engines):
        for engine in engines:
            await engine.set_mode(mode, marker=MARKER)
        async with Client(gateway.port) as client:
            for number in range(2 * len(engines)):
                assert (await client.post(CHAT, _body(f"Question {number}?"))).status == 200
            before = await _changes(client)
            for first in range(0, CALLS, AT_ONCE):
                numbers = range(first, first + AT_ONCE)
                good = [_body(f"Question {number} of all?") for number in numbers]
                bad = [_body(f"{MARKER} {number % bodies}") for number in numbers]
                answers = await asyncio.gather(*[client.post(CHAT, body) for body in (*good, *bad)])
                assert all(map(is_good, good, answers[:AT_ONCE]))
                assert all(answer.status >= 500 for answer in answers[AT_ONCE:])
            assert await _changes(client) == before


async def test_an_engine_that_fails_everybody_goes_out_beside_bad_calls(tmp_path: Path) -> None:
    with engines_of_demo(tmp_path, "ab", "--first-s", "0.05") as (gateway, (sick, well)):
        async with Client(gateway.port) as client:
            for number in range(4):
                assert (await client.post(CHAT, _body(f"Question {number}?"))).status == 200
            await sick.set_mode("html_as_json")
            await well.set_mode("html_as_json", marker=MARKER)
            for first in range(0, CALLS, 8):
                numbers = range(first, first + 8)
                bodies = [_body(f"{MARKER if number % 2 else 'Question'} {number}?") for number in numbers]
                answers = await asyncio.gather(*[client.post(CHAT, body) for body in bodies])
                assert all(map(is_good, bodies[::2], answers[::2]))
        assert "engine ejected" in gateway.log()
