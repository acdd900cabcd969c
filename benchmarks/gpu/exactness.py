"""How exact the gateway's picture of the caches is while the engines evict.

Calls ask about random documents, more of them than the caches hold. Each call's prediction is compared with the cached
tokens that the engine reports for it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import httpx

from benchmarks.gpu.calls import Caller, Served, caller, fresh, quantile
from benchmarks.gpu.engines import Engine
from benchmarks.gpu.gateways import gateway
from benchmarks.gpu.section import Figures, Fleet
from plait.backends.errors import PlaitError

WATCH_S = 0.25
LAST_S = 4.0
"""So long before the section's end no call begins."""


@dataclass(frozen=True)
class Plan:
    """Documents, their length, the calls under way at a time, and each call's own tokens and output."""

    documents: int
    document_tokens: int
    concurrency: int = 6
    question_tokens: int = 64
    output_tokens: int = 8


GPU = Plan(documents=60, document_tokens=4_000)
CPU = Plan(documents=24, document_tokens=1_900)


async def measure(plan: Plan, fleet: Fleet, seconds: float, figures: Figures) -> None:
    """Send calls until the time is up, and compare."""
    ends_s, rng = time.monotonic() + seconds - LAST_S, random.Random("exactness")
    documents = [fresh(rng, plan.document_tokens) for _ in range(plan.documents)]
    evictions = {engine.name: 0 for engine in fleet.engines}
    figures["plan"] = {"documents": plan.documents, "document tokens": plan.document_tokens}
    computed = _computed(fleet.engines)
    async with gateway(fleet.engines, fleet.folder) as url, caller(url) as calls:
        figures["gateway"] = "ready, no engine degraded"
        watching = [asyncio.create_task(_count_evictions(engine, evictions)) for engine in fleet.engines]
        try:
            answers, errors = await _ask(calls, plan, documents, rng, ends_s)
        finally:
            for task in watching:
                task.cancel()
        figures |= _compared(answers, fleet) | {"errors": errors[:5], "failed calls": len(errors)}
        figures["evicted tree blocks, at least"] = evictions
        figures["computed prompt tokens"] = _computed(fleet.engines) - computed
        await asyncio.sleep(1.0)
        figures["at rest"] = {engine.name: await asyncio.to_thread(_at_rest, engine, url) for engine in fleet.engines}


async def _ask(
    calls: Caller, plan: Plan, documents: Sequence[list[int]], rng: random.Random, ends_s: float
) -> tuple[list[Served], list[str]]:
    """So many calls at a time, until `ends_s`."""
    answers, errors = list[Served](), list[str]()

    async def ask_on() -> None:
        while time.monotonic() < ends_s:
            prompt = [*rng.choice(documents), *fresh(rng, plan.question_tokens)]
            try:
                answers.append(await calls.complete(prompt, plan.output_tokens))
            except (ValueError, PlaitError) as error:
                errors.append(str(error))
                await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.concurrency):
            group.create_task(ask_on())
    return answers, errors


def _compared(answers: Sequence[Served], fleet: Fleet) -> Figures:
    """The share of predictions within a tree block of what the engine found, and their errors in tokens."""
    block = fleet.engines[0].cache_state().granularity_tokens
    errors = [(one.predicted_tokens or 0) - one.cached_tokens for one in answers]
    hits = [one for one in answers if one.cached_tokens > 0]
    return {
        "calls": len(answers),
        "calls by engine": {name: sum(one.engine == name for one in answers) for name in {a.engine for a in answers}},
        "tree block (tokens)": block,
        "share of predictions within a tree block": fmean(abs(error) <= block for error in errors),
        "largest errors (predicted - found)": sorted(errors, key=abs, reverse=True)[:8],
        "share of calls with cached tokens": len(hits) / len(answers),
        "TTFT p50 (s)": quantile([one.ttft_s for one in answers], 0.5),
    }


async def _count_evictions(engine: Engine, evictions: dict[str, int]) -> None:
    """Add up the tree blocks that its reports say are gone. What goes and returns between two reports is missed."""
    state = await asyncio.to_thread(engine.cache_state)
    while True:
        await asyncio.sleep(WATCH_S)
        state = await asyncio.to_thread(engine.cache_state, state)
        if not state.snapshot:
            evictions[engine.name] += len(state.removed)


def _at_rest(engine: Engine, gateway_url: str) -> Figures:
    """The blocks that running calls use by the report and by vLLM's gauge; tokens by the report and the gateway."""
    state = engine.cache_state()
    stored = sum(len(run.hashes) for run in state.stored) * state.granularity_tokens
    text = httpx.get(f"{gateway_url}/metrics", trust_env=False, timeout=10.0).text
    known = [line for line in text.splitlines() if line.startswith("plait_engine_resident_tokens")]
    return {
        "blocks": state.kv.total_blocks,
        "used blocks by the report": state.kv.total_blocks - state.kv.free_blocks - state.kv.cached_blocks,
        "used share by vLLM's gauge": engine.metric("vllm:kv_cache_usage_perc"),
        "cached tokens by the report": stored,
        "cached tokens that the gateways know": known,
    }


def _computed(engines: Sequence[Engine]) -> float:
    return sum(engine.computed_prompt_tokens() for engine in engines)
