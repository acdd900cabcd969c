"""Servers with several data-parallel ranks: a killed one, and one with a busy rank that it does not tell."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.faults.fleet import engines_of_demo
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.verdicts import is_good, text_of
from e2e.server_process import Server, eventually
from e2e.servers import Launcher

RANKS: Final = 4
CLIENTS: Final = 24
KILLS: Final = 8 if "PLAIT_NIGHTLY" in os.environ else 2


def _body(question: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 16, **fields}


def _ranks_up(gateway: Server, address: str) -> int:
    lines = gateway.get("/metrics").text.splitlines()
    return sum(line.startswith(f'plait_engine_up{{engine="{address}@') and line.endswith(" 1.0") for line in lines)


def _are_up(gateway: Server, address: str) -> bool:
    return _ranks_up(gateway, address) == RANKS


async def _call_until(client: Client, worker: int, over: asyncio.Event) -> list[Answer]:
    """Call, one call after the other; every second one is streamed."""
    answers: list[Answer] = []
    while not over.is_set():
        number = len(answers)
        answers.append(await client.post(CHAT, _body(f"Question {number} of {worker}?", stream=number % 2 == 0)))
    return answers


async def test_a_killed_server_with_ranks_costs_no_call_that_has_no_byte(launch: Launcher) -> None:
    """A call has three attempts, and the server has four ranks: all of them go out at once."""
    servers = [launch.engine(name, options=["--ranks", str(RANKS)]) for name in "ab"]
    gateway = launch.gateway(servers, upstream={"probe_interval_s": 1.0})
    for server in (*servers, gateway):
        server.start()
    eventually(lambda: all(_are_up(gateway, name) for name in "ab"))
    over = asyncio.Event()
    async with Client(gateway.port) as client:
        calls = [asyncio.create_task(_call_until(client, worker, over)) for worker in range(CLIENTS)]
        for number in range(KILLS):
            victim = servers[number % 2]
            await asyncio.sleep(0.5)
            victim.kill()
            await asyncio.sleep(1.5)
            assert _ranks_up(gateway, victim.name) == 0
            victim.start()
            await asyncio.to_thread(eventually, partial(_are_up, gateway, victim.name))
        over.set()
        answers = [answer for some in await asyncio.gather(*calls) for answer in some]
    lost = [answer for answer in answers if answer.status != 200 or (answer.broken and answer.first_s is None)]
    assert len(answers) > 20 * KILLS
    assert lost == []
    engines = {answer.header("plait-engine") for answer in answers}
    assert engines == {f"{name}@{rank}" for name in "ab" for rank in range(RANKS)}


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_a_call_behind_a_busy_rank_is_not_cut(tmp_path: Path, names: str) -> None:
    """One address may have several queues. Those in the busy one wait, while the others overtake them."""
    with engines_of_demo(tmp_path, names, "--first-s", "0.4") as (gateway, _):
        async with Client(gateway.port) as client:

            async def ask(worker: int) -> list[tuple[dict[str, Any], Answer]]:
                busy = {"silence": {"first_s": 5.0}} if worker < 4 else {}
                bodies = [_body(f"{n} of {worker}?", stream=n % 2 == 0, **busy) for n in range(2 if busy else 16)]
                return [(body, await client.post(CHAT, body)) for body in bodies]

            asked = [one for some in await asyncio.gather(*map(ask, range(16))) for one in some]
    assert len(asked) == 200
    assert [text_of(answer, streamed=body["stream"]) for body, answer in asked if not is_good(body, answer)] == []
