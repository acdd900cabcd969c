"""Agents whose contexts exceed a real engine's cache: some are held, so that the others keep theirs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import openai
import pytest

from e2e.real_engines.engine import KV_TOKENS, MODEL
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.sdk import async_client
from e2e.server_process import Server, eventually
from plait.policy.sessions.worth import ACTIVE_S, CLOSES_LOAD, CLOSES_VALUE, OPENS_LOAD
from tests.waiting import WITHIN_S

SESSIONS, TURNS = 16, 9
FITTING: Final = 8
"""So many contexts have room in the engine's cache."""
CONTEXT_TOKENS: Final = KV_TOKENS // FITTING
THINK_S: Final = 0.2


@pytest.fixture
def gateway(fleet: EngineFleet, model: Path, folder: Path) -> Iterator[Server]:
    """A gateway over one of the engines, for which prompts of 500 tokens are no chat."""
    name, engine = next(iter(fleet.engines.items()))
    server = new_gateway("sessions", {name: engine}, model, folder, admission={"chat_tokens": 500})
    server.start()
    try:
        server.wait_until_ready()
        eventually(lambda: server.metric("plait_engine_up") == 1)
        yield server
    finally:
        server.stop()


async def run_agent(client: openai.AsyncOpenAI, number: int) -> Sequence[float]:
    """An agent that names no session. Returns the cached part of each of its prompts."""
    dice, shares = random.Random(number), list[float]()
    prompt = [dice.randrange(100, 7_000) for _ in range(CONTEXT_TOKENS)]
    for _ in range(TURNS):
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=8, extra_body={"ignore_eos": True, "return_token_ids": True}
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        shares.append((0 if details is None else details.cached_tokens or 0) / answer.usage.prompt_tokens)
        prompt += [dice.randrange(100, 7_000) for _ in range(80)]
        await asyncio.sleep(THINK_S)
    return shares


def test_agents_are_held_while_that_is_worth_it(gateway: Server, findings: Findings) -> None:
    async def all_of_them() -> Sequence[Sequence[float]]:
        async with async_client(gateway, timeout=5 * WITHIN_S) as client:
            return await asyncio.gather(*(run_agent(client, number) for number in range(SESSIONS)))

    shares = asyncio.run(all_of_them())
    value, load = (gateway.metric(f"plait_session_{name}", model=MODEL) for name in ("value", "load"))
    early, late = (fmean(share for one in shares for share in one[turns]) for turns in (slice(1, 3), slice(-3, None)))
    findings.figures[f"{SESSIONS} agents with contexts for {SESSIONS / FITTING:g} caches"] = {
        "cached share of the second and third prompts": early,
        "of the last three": late,
        "value": value,
        "load": load,
    }
    assert (value >= CLOSES_VALUE, load >= CLOSES_LOAD) == (True, True), (value, load)
    assert gateway.metric("plait_session_gate_closed", model=MODEL) == 1
    assert late > FITTING / SESSIONS + 0.1, "agents in turn would find as much as has room, or less"
    assert not gateway.metric("plait_refusals_total")

    time.sleep(ACTIVE_S)
    with_chat = gateway.post("/v1/completions", json={"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1})
    assert with_chat.status_code == 200
    assert gateway.metric("plait_session_load", model=MODEL) < OPENS_LOAD
    assert gateway.metric("plait_session_gate_closed", model=MODEL) == 0, "nobody is active any more"
