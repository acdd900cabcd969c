"""What `plait-slo` and the waited time say of calls that wait in the gateway, in one line and in two."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from e2e.sdk import asking, async_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher
from tests.waiting import SLOWNESS

ENOUGH = {"plait-slo-ttft-ms": "600000"}
BUSY_TOKENS = round(150 * SLOWNESS)
"""An engine with one slot is busy with them for some four seconds, and longer where the others take longer to come."""


async def headers_of(client: AsyncOpenAI, request: dict[str, Any], headers: dict[str, str]) -> Any:
    call = client.chat.completions.with_streaming_response.create(**request, stream=True, extra_headers=headers)
    async with call as raw:
        await raw.read()
        return raw.headers


def waits_of(gateway: Server) -> dict[str, float]:
    """How long each ended call waited, by its id, as the log has it."""
    lines = [json.loads(line) for line in gateway.log().splitlines() if line.startswith("{")]
    return {line["request_id"]: line["waited_s"] for line in lines if line["event"] == "call"}


async def test_a_call_that_has_waited_past_its_times_is_told_so(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        engine = launch.engine("slow", time_scale=1, options=["--max-running-calls", "1"])
        fleet = Fleet(launch.gateway([engine]), {engine.name: engine})
        await asyncio.to_thread(fleet.start)
        async with async_client(fleet.gateway) as client:
            busy = asking("busy", max_tokens=BUSY_TOKENS, extra_body={"ignore_eos": True})
            first = asyncio.create_task(client.chat.completions.create(**busy))
            gateway = fleet.gateway
            await asyncio.to_thread(eventually, lambda: gateway.metric("plait_engine_outstanding_calls") == 1)
            late, late_answer, patient = await asyncio.gather(
                headers_of(client, asking("late"), {"plait-slo-ttft-ms": "1000"}),
                headers_of(client, asking("late answer"), {"plait-slo-jct-ms": "1500"}),
                headers_of(client, asking("patient"), ENOUGH),
            )
            await first
    assert [answer["plait-slo"] for answer in (late, late_answer, patient)] == ["missed", "missed", "expected"]
    assert float(late["plait-waited-s"]) > 1.0


async def test_a_call_that_changes_lines_has_all_of_its_wait_and_its_promise(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name, time_scale=1) for name in ("first", "second")]
        gateway = launch.gateway(engines)
        for server in (*engines, gateway):
            await asyncio.to_thread(server.start)
            if server is gateway:
                engines[1].signal(signal.SIGSTOP)
            await asyncio.to_thread(server.wait_until_ready)
        async with async_client(gateway) as client:
            calls: list[asyncio.Task[Any]] = []
            for number in range(4):  # one after the other: a call with an earlier deadline would be sent past these
                prompt = " ".join(f"chapter {number} line {line}" for line in range(3_000))
                calls.append(asyncio.create_task(headers_of(client, asking(prompt), ENOUGH)))
                await asyncio.to_thread(
                    eventually, lambda: gateway.metric("plait_engine_outstanding_calls") == len(calls)
                )
            inside = time.monotonic()
            await asyncio.sleep(1.5)
            alone_s = time.monotonic() - inside
            engines[1].signal(signal.SIGCONT)
            answers = await asyncio.gather(*calls)
        moved = [answer for answer in answers if answer["plait-engine"] == "second"]
        assert moved
        assert [answer["plait-slo"] for answer in answers] == ["expected"] * 4
        waits = await asyncio.to_thread(waits_of, gateway)
        for answer in moved:
            assert float(answer["plait-waited-s"]) > alone_s
            assert abs(float(answer["plait-waited-s"]) - waits[answer["x-request-id"]]) < 0.01
