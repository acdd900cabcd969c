"""Gateways that share a store and die, stop or lose it, in the middle of programs: nothing that was told is lost."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from e2e.postgresql.outages import Outages
from e2e.postgresql.server import ABSENT, binaries, shared_postgres
from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from tests.waiting import SLOWNESS, WITHIN_S

pytestmark = pytest.mark.skipif(binaries() is None, reason=ABSENT)


@pytest.fixture
async def outages(tmp_path: Path) -> AsyncIterator[Outages]:
    with Launcher(tmp_path) as launch:
        made = Outages(launch, random.Random(7))
        await made.start()
        yield made


def end(outages: Outages) -> None:
    assert outages.end().problems == []


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.nightly)])
async def test_the_others_go_on_with_what_a_killed_gateway_had(outages: Outages, kills: int) -> None:
    for number in range(kills):
        await outages.round(f"kill-{number}", outages.kill)
    assert max(outages.findings.starts, default=0) <= 3
    await asyncio.to_thread(end, outages)


@pytest.mark.parametrize("restarts", [2, pytest.param(20, marks=pytest.mark.nightly)])
async def test_a_rolling_restart_loses_nothing(outages: Outages, restarts: int) -> None:
    async with outages.plain_calls() as plain:
        for number in range(restarts):
            await outages.round(f"restart-{number}", outages.restart_one_by_one)
    assert plain.problems == []
    assert plain.calls > 20
    await asyncio.to_thread(end, outages)


@pytest.mark.parametrize("seconds", [6, pytest.param(30, marks=pytest.mark.nightly)])
async def test_a_store_that_is_away_stops_sessions_only(outages: Outages, seconds: float) -> None:
    postgres = shared_postgres()

    async def away() -> None:
        await asyncio.to_thread(postgres.stop)
        try:
            until_s = time.monotonic() + seconds
            refused = await asyncio.to_thread(_refusal, outages.gateways.members[0])
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "store_failed"
            assert refused.headers["retry-after"] == "1"
            ready = await asyncio.to_thread(outages.gateways.members[0].get, "/ready")
            assert (ready.status_code, ready.json()["store"] == "ok") == (200, False)
            await asyncio.sleep(until_s - time.monotonic())
        finally:
            await asyncio.to_thread(postgres.start)

    async with outages.plain_calls() as plain:
        await outages.round("away", away)
    assert plain.problems == []
    assert plain.unstored > 0, "no response came while the store was away"
    assert outages.gateways.metric("plait_sessions_taken_over_total") == 0, "nobody had died"
    await asyncio.to_thread(end, outages)


def _refusal(gateway: Server) -> httpx.Response:
    """What a gateway says to a value while its store is away, once it has noticed."""
    given = {"session_id": "refused", "semantic_var_id": "v", "value": "x"}
    eventually(lambda: gateway.post("/v1/variables", json=given).status_code == 503)
    return gateway.post("/v1/variables", json=given)


async def test_a_gateway_that_was_stopped_past_its_lease_writes_nothing(outages: Outages) -> None:
    stopped, *others = outages.gateways.members

    def value(gateway: Server, variable: str) -> object:
        return gateway.get(f"/v1/variables/s/{variable}").json().get("value")

    def give(gateway: Server, variable: str, given: str) -> httpx.Response:
        return gateway.post("/v1/variables", json={"session_id": "s", "semantic_var_id": variable, "value": given})

    def wait_for(gateway: Server, variable: str) -> httpx.Response:
        return gateway.post("/v1/get", json={"session_id": "s", "semantic_var_id": variable, "timeout_s": WITHIN_S})

    assert (await asyncio.to_thread(give, stopped, "before", "kept")).status_code == 200
    waiting = asyncio.create_task(asyncio.to_thread(wait_for, stopped, "later"))
    await asyncio.sleep(0.5 * SLOWNESS)  # nothing tells that the request has come
    stopped.signal(signal.SIGSTOP)
    try:
        late = asyncio.create_task(asyncio.to_thread(give, stopped, "x", "of the stopped one"))
        await asyncio.to_thread(eventually, lambda: value(others[0], "before") == "kept")
        assert (await asyncio.to_thread(give, others[1], "x", "of the others")).status_code == 200
    finally:
        stopped.signal(signal.SIGCONT)
    told = await late
    assert told.status_code in {409, 503}, told.text
    told = await waiting
    assert (told.status_code, told.headers["retry-after"]) == (503, "1"), told.text
    for gateway in outages.gateways.members:
        await asyncio.to_thread(eventually, lambda one=gateway: value(one, "x") == "of the others")  # type: ignore[misc]
    assert (await asyncio.to_thread(give, stopped, "after", "by the stopped one")).status_code == 200
    assert await asyncio.to_thread(value, others[0], "after") == "by the stopped one"
    assert "was given up" in stopped.log()
