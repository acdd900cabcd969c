"""A recorded program of 25 calls (MetaGPT), given to the gateway whole with variables, or chained by its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from benchmarks.gpu.engines import MODEL
from benchmarks.gpu.gateways import Settings, gateways
from benchmarks.gpu.section import Figures, Fleet
from e2e.programs import Program, chained_by_client, metagpt, wanted, whole
from e2e.traces import ABSENT, METAGPT

BY_VARIABLES, BY_CLIENT = "by variables", "chained by the client"
ARMS = (BY_VARIABLES, BY_CLIENT, BY_CLIENT, BY_VARIABLES)
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Plan:
    """Programs at once, and the share of the recorded output tokens that their calls make."""

    programs: int
    output_share: float


GPU = Plan(programs=4, output_share=1 / 8)
CPU = Plan(programs=1, output_share=1 / 100)


async def measure(plan: Plan, fleet: Fleet, _seconds: float, figures: Figures) -> None:
    """Run the arms in turns, each with empty caches."""
    if not METAGPT.is_file():
        raise ValueError(ABSENT)
    program = metagpt(plan.output_share)
    runs = figures["runs"] = []
    async with gateways(fleet.folder, Settings(fleet.engines, profile=fleet.profile)) as [url]:
        for turn, arm in enumerate(ARMS):
            computed = fleet.emptied()
            makespans_s = await _run(arm, url, program, [f"team-{turn}-{number}" for number in range(plan.programs)])
            runs.append(
                {
                    "arm": arm,
                    "makespan, last (s)": max(makespans_s),
                    "makespan, mean (s)": fmean(makespans_s),
                    "computed prompt tokens": fleet.computed_prompt_tokens() - computed,
                    "requests of a client": 1 if arm == BY_VARIABLES else len(program),
                }
            )
    for figure in ("makespan, last (s)", "makespan, mean (s)", "computed prompt tokens"):
        figures[f"{figure}, client / variables"] = _mean(runs, BY_CLIENT, figure) / _mean(runs, BY_VARIABLES, figure)


async def _run(arm: str, url: str, program: Program, sessions: Sequence[str]) -> list[float]:
    """Run a program in each session at once. They share nothing. Returns the seconds that each took."""
    client = AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=TIMEOUT_S,
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    )

    async def run(session: str) -> float:
        began_s = time.monotonic()
        extra = {"ignore_eos": True, "cache_salt": session}
        if arm == BY_VARIABLES:
            await _as_one_program(client, session, program, extra)
        else:
            await chained_by_client([client], program, model=MODEL, temperature=0, extra_body=extra)
        return time.monotonic() - began_s

    async with client:
        return await asyncio.gather(*map(run, sessions))


async def _as_one_program(client: AsyncOpenAI, session: str, program: Program, extra: dict[str, Any]) -> None:
    """One request, which waits for what no other call takes."""
    calls = [call | {"model": MODEL, "temperature": 0} | extra for call in whole(program)]
    gets = {call.output: "latency" for call in wanted(program, "latency") if call.objective}
    body = {"session": session, "calls": calls, "gets": gets}
    answer: Any = await client.post("/programs", cast_to=object, body=body)
    if answer["errors"]:
        raise ValueError(f"calls failed: {answer['errors']}")


def _mean(runs: Sequence[Figures], arm: str, figure: str) -> float:
    return fmean(run[figure] for run in runs if run["arm"] == arm)
