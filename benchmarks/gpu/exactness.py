"""How exact the gateway's picture of the caches is while the engines evict.

Calls ask about random documents, more of them than the caches hold. Each call's prediction is compared with the cached
tokens that the engine reports for it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import httpx

from benchmarks.gpu.calls import Caller, Served, caller, fresh, quantile
from benchmarks.gpu.engines import Engine
from benchmarks.gpu.gateways import Settings, gateways
from benchmarks.gpu.section import Figures, Fleet
from plait.backends.errors import PlaitError

WATCH_S = 0.25
ASKED_SHARE = 0.85
"""Of the section's time. No call begins later."""


@dataclass(frozen=True)
class Plan:
    """Documents, their length, the calls under way at a time, and each call's own tokens and output."""

    documents: int
    document_tokens: int
    concurrency: int = 6
    question_tokens: int = 64
    output_tokens: int = 8


GPU = Plan(documents=60, document_tokens=4_000)
CPU = Plan(documents=13, document_tokens=900, concurrency=4)


async def measure(plan: Plan, fleet: Fleet, seconds: float, figures: Figures) -> None:
    """Send calls until the time is up, and compare."""
    ends_s, rng = time.monotonic() + ASKED_SHARE * seconds, random.Random("exactness")
    documents = [fresh(rng, plan.document_tokens) for _ in range(plan.documents)]
    found = _Found(fleet)
    figures["plan"] = {"documents": plan.documents, "document tokens": plan.document_tokens}
    async with gateways(fleet.folder, Settings(fleet.engines, profile=fleet.profile)) as [url], caller(url) as calls:
        figures["gateway"] = "ready, no engine degraded"
        watching = [asyncio.create_task(_count_evictions(engine, found)) for engine in fleet.engines]
        try:
            await _ask(calls, plan, documents, rng, found, ends_s=ends_s)
        finally:
            for task in watching:
                task.cancel()
            figures |= found.figures()
        await asyncio.sleep(1.0)
        figures["at rest"] = {engine.name: await asyncio.to_thread(_at_rest, engine, url) for engine in fleet.engines}


class _Found:
    """What the section has seen so far."""

    def __init__(self, fleet: Fleet) -> None:
        self.answers: list[Served] = []
        self.errors: list[str] = []
        self.evictions = {engine.name: 0 for engine in fleet.engines}
        self._fleet = fleet
        self._computed = fleet.computed_prompt_tokens()

    def figures(self) -> Figures:
        """The share of predictions within a tree block of what the engine found, and their errors in tokens."""
        answers, block = self.answers, self._fleet.engines[0].cache_state().granularity_tokens
        errors = [(one.predicted_tokens or 0) - one.cached_tokens for one in answers]
        return {
            "calls": len(answers),
            "calls by engine": dict(Counter(one.engine for one in answers)),
            "failed calls": len(self.errors),
            "errors": self.errors[:5],
            "tree block (tokens)": block,
            "share of predictions within a tree block": _share(abs(error) <= block for error in errors),
            "largest errors (predicted - found)": sorted(errors, key=abs, reverse=True)[:8],
            "share of calls with cached tokens": _share(one.cached_tokens > 0 for one in answers),
            "TTFT p50 (s)": quantile([one.ttft_s for one in answers], 0.5),
            "evicted tree blocks, at least": self.evictions,
            "computed prompt tokens": self._fleet.computed_prompt_tokens() - self._computed,
        }


async def _ask(
    calls: Caller, plan: Plan, documents: Sequence[list[int]], rng: random.Random, found: _Found, *, ends_s: float
) -> None:
    """So many calls at a time, until `ends_s`."""

    async def ask_on() -> None:
        while time.monotonic() < ends_s:
            prompt = [*rng.choice(documents), *fresh(rng, plan.question_tokens)]
            try:
                found.answers.append(await calls.complete(prompt, plan.output_tokens))
            except (ValueError, PlaitError) as error:
                found.errors.append(str(error))
                await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.concurrency):
            group.create_task(ask_on())


async def _count_evictions(engine: Engine, found: _Found) -> None:
    """Add up the tree blocks that its reports say are gone. What goes and returns between two reports is missed."""
    state = await asyncio.to_thread(engine.cache_state)
    while True:
        await asyncio.sleep(WATCH_S)
        state = await asyncio.to_thread(engine.cache_state, state)
        if not state.snapshot:
            found.evictions[engine.name] += len(state.removed)


def _at_rest(engine: Engine, gateway_url: str) -> Figures:
    """The blocks that calls use by the report and by vLLM's gauge, and cached tokens by the report and the gateway."""
    state = engine.cache_state()
    stored = sum(len(run.hashes) for run in state.stored) * state.granularity_tokens
    text = httpx.get(f"{gateway_url}/metrics", trust_env=False, timeout=10.0).text
    sample = f'plait_engine_resident_tokens{{engine="{engine.name}"}} '
    known = [float(line.removeprefix(sample)) for line in text.splitlines() if line.startswith(sample)]
    return {
        "blocks": state.kv.total_blocks,
        "used blocks by the report": state.kv.total_blocks - state.kv.free_blocks - state.kv.cached_blocks,
        "used share by vLLM's gauge": engine.metric("vllm:kv_cache_usage_perc"),
        "cached tokens by the report": stored,
        "cached tokens that the gateway knows": sum(known),
    }


def _share(holds: Iterable[bool]) -> float:
    """The share that holds; 0 of none."""
    every = list(holds)
    return sum(every) / len(every) if every else 0.0
