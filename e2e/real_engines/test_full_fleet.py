"""More than a real engine can take, most of it from one tenant: the others lose nothing, and the engine no trust."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from e2e.real_engines.engine import MODEL
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.server_process import NO_TLS, Server, eventually
from tests.waiting import WITHIN_S

HEAVY: Final = "heavy"
WEIGHTS: Final = {HEAVY: 20, "light-1": 1, "light-2": 1}
"""How many calls each tenant sends, relative to the others."""
CLIENTS, CLOSED_S = 64, 8.0
LOAD, OPEN_S = 1.9, 20.0
PROMPT_TOKENS, ANSWER_TOKENS = 64, 24


@dataclass(frozen=True)
class Ended:
    """A call: whose it was, and what came of it. `text` has its end."""

    tenant: str
    status: int
    is_whole: bool
    ttft_s: float
    text: str


@pytest.fixture
def gateway(fleet: EngineFleet, model: Path, folder: Path) -> Iterator[Server]:
    """A gateway over one of the engines, with three tenants."""
    name, engine = next(iter(fleet.engines.items()))
    tenants = [{"name": tenant, "api_keys": [f"key-of-{tenant}"]} for tenant in WEIGHTS]
    server = new_gateway("full", {name: engine}, model, folder, tenants=tenants)
    server.start()
    try:
        server.wait_until_ready()
        eventually(lambda: server.metric("plait_engine_up") == 1)
        yield server
    finally:
        server.stop()


async def ask(http: httpx.AsyncClient, tenant: str, number: int) -> Ended:
    """A streamed call with a prompt of its own."""
    body: dict[str, Any] = {"model": MODEL, "prompt": [number, *range(100, 99 + PROMPT_TOKENS)], "stream": True}
    body |= {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    began_s, first_s, text = time.monotonic(), None, ""
    headers = {"authorization": f"Bearer key-of-{tenant}"}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        async for part in response.aiter_text():
            if first_s is None and "data: " in part:
                first_s = time.monotonic()
            text += part
    is_whole = text.rstrip().endswith("data: [DONE]") and '"error":' not in text  # a token may be "error"
    return Ended(tenant, response.status_code, is_whole, (first_s or time.monotonic()) - began_s, text[-600:])


async def capacity_s(http: httpx.AsyncClient) -> float:
    """The calls a second that the engine completes if there are always some."""
    began_s, done = time.monotonic(), 0

    async def go_on(first: int) -> None:
        nonlocal done
        for number in range(first, 5_000, CLIENTS):
            if time.monotonic() - began_s >= CLOSED_S:
                return
            ended = await ask(http, HEAVY, number)
            assert ended.is_whole, ended
            done += 1

    await asyncio.gather(*(go_on(1 + client) for client in range(CLIENTS)))
    return done / (time.monotonic() - began_s)


async def test_light_tenants_lose_nothing_and_no_engine_is_suspected(gateway: Server, findings: Findings) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway.url, verify=NO_TLS, timeout=5 * WITHIN_S, limits=limits) as http:
        rate_s = LOAD * await capacity_s(http)
        dice, number, asked, began_s = random.Random(5), 5_000, list[asyncio.Task[Ended]](), time.monotonic()
        due_s = 0.0
        while (due_s := due_s + dice.expovariate(rate_s)) < OPEN_S:
            await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
            (tenant,) = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))
            number += 1
            asked.append(asyncio.create_task(ask(http, tenant, number % 7_000)))
        ended = await asyncio.gather(*asked)
    light, heavy = ([one for one in ended if (one.tenant == HEAVY) == is_heavy] for is_heavy in (False, True))
    findings.figures[f"three tenants at {LOAD:g} times what an engine takes"] = {
        "calls/s": rate_s,
        "light calls": len(light),
        "longest TTFT of these": max(one.ttft_s for one in light),
    }
    assert [one for one in light if not one.is_whole] == []
    assert {one.status for one in heavy} <= {200, 429}
    changes = [gateway.metric("plait_engine_health_changes_total", state=state) for state in ("suspect", "ejected")]
    assert changes == [0, 0]
