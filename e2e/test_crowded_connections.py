"""A tenant whose calls wait on most of the connections: others still get through, and operators, too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.server_process import NO_TLS
from e2e.servers import Fleet, Launcher
from e2e.tenants import KEYS
from tests.waiting import WITHIN_S

CONNECTIONS = 32
ALLOWED = CONNECTIONS * 7 // 8
"""What a tenant may have of them."""
LONG_TOKENS = 20_000
"""Of an answer that takes longer than the test."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Fleet]:
    """A gateway with few connections, and an engine that is slow."""
    with Launcher(tmp_path) as launch:
        engine = launch.engine("demo-1", time_scale=1)
        server = {"api_keys": KEYS, "max_connections": CONNECTIONS}
        fleet = Fleet(launch.gateway([engine], server=server, admission={"max_running": 2}), {engine.name: engine})
        fleet.start()
        yield fleet


async def test_calls_that_wait_leave_connections_to_other_tenants(small: Fleet) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=small.gateway.url, verify=NO_TLS, timeout=WITHIN_S, limits=limits) as http:

        async def ask(key: str, output_tokens: int) -> httpx.Response:
            body = {"model": "demo", "prompt": "A word. " * 20, "max_tokens": output_tokens, "ignore_eos": True}
            return await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        flood = list[asyncio.Task[httpx.Response]]()
        async with asyncio.timeout(WITHIN_S):
            for number in range(2 * CONNECTIONS):
                flood.append(asyncio.create_task(ask(KEYS[0], LONG_TOKENS)))
                while sum(task.done() for task in flood) <= number - ALLOWED:  # noqa: ASYNC110 - no event for all
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.01)  # so that a refused one's connection is closed before the next
        waiting = [task for task in flood if not task.done()]
        refused = [task.result() for task in flood if task.done()]
        assert {(one.status_code, one.json()["error"]["code"]) for one in refused} == {(429, "too_many_open_requests")}
        assert {one.headers["connection"] for one in refused} == {"close"}
        assert len(waiting) == ALLOWED
        assert (await ask(KEYS[1], 4)).status_code == 200
        assert (await http.get("/health")).status_code == 200
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        async with asyncio.timeout(WITHIN_S):  # until the calls that left count no more
            while (await ask(KEYS[0], 4)).status_code != 200:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.05)
