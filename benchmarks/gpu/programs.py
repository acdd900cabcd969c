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
from benchmarks.gpu.gateways import gateway
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
    """Run the arms in turns, each with a new gateway and empty caches."""
    if not METAGPT.is_file():
        raise ValueError(ABSENT)
    program = metagpt(plan.output_share)
    runs = figures["runs"] = []
    for arm in ARMS:
        for engine in fleet.engines:
            engine.empty_cache()
        computed = sum(engine.computed_prompt_tokens() for engine in fleet.engines)
        async with gateway(fleet.engines, fleet.folder) as url:
            makespans_s = await _run(arm, url, program, plan.programs)
        runs.append(
            {
                "arm": arm,
                "makespan, last (s)": max(makespans_s),
                "makespan, mean (s)": fmean(makespans_s),
                "computed prompt tokens": sum(engine.computed_prompt_tokens() for engine in fleet.engines) - computed,
                "requests of a client": 1 if arm == BY_VARIABLES else len(program),
            }
        )
    for figure in ("makespan, last (s)", "makespan, mean (s)", "computed prompt tokens"):
        figures[f"{figure}, client / variables"] = _mean(runs, BY_CLIENT, figure) / _mean(runs, BY_VARIABLES, figure)


async def _run(arm: str, url: str, program: Program, count: int) -> list[float]:
    """Run so many programs at once, which share nothing; the seconds that each took."""
    client = AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=TIMEOUT_S,
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    )

    async def run(number: int) -> float:
        began_s = time.monotonic()
        extra = {"ignore_eos": True, "cache_salt": f"team {number}"}
        if arm == BY_VARIABLES:
            await _as_one_program(client, f"team-{number}", program, extra)
        else:
            await chained_by_client([client], program, model=MODEL, temperature=0, extra_body=extra)
        return time.monotonic() - began_s

    async with client:
        return await asyncio.gather(*(run(number) for number in range(count)))


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
