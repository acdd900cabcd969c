"""What Plait's scheduler adds to an iteration: calls that only decode, on an engine with it and on a stock one."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.gpu.calls import caller, fresh
from benchmarks.gpu.engines import Engine
from benchmarks.gpu.section import Figures, Fleet
from plait.lab.profiling.timed_stream import inter_token_s

LAST_S = 1.0


@dataclass(frozen=True)
class Plan:
    """Calls at once, and their prompts and outputs."""

    batch: int = 32
    prompt_tokens: int = 64
    output_tokens: int = 128


GPU = Plan()
CPU = Plan(batch=4, output_tokens=200)


async def measure(plan: Plan, fleet: Fleet, seconds: float, figures: Figures) -> None:
    """Take turns until the time is up; each goes first in every other turn."""
    engines = {"slo": fleet.engines[0], "stock": fleet.stock}
    found: dict[str, list[float]] = {name: [] for name in engines}
    figures["TPOT (s)"] = found
    ends_s, longest_s, turn = time.monotonic() + seconds - LAST_S, 0.0, 0
    while time.monotonic() + longest_s < ends_s:
        began_s = time.monotonic()
        for name in list(engines)[:: 1 if turn % 2 else -1]:
            tpot_s = await _tpot_s(plan, engines[name], f"{name} {turn}")
            if turn:  # the first turn warms up
                found[name].append(tpot_s)
        turn, longest_s = turn + 1, max(longest_s, time.monotonic() - began_s)
    if not found["stock"]:
        raise ValueError("not one pair in the time")
    pairs = [ours / stock for ours, stock in zip(found["slo"], found["stock"], strict=True)]
    figures["TPOT of slo / stock, median of pairs"] = median(pairs)
    figures["mean TPOT (s)"] = {name: fmean(values) for name, values in found.items()}
    figures["pairs"] = len(pairs)


async def _tpot_s(plan: Plan, engine: Engine, seed: str) -> float:
    """The time between tokens while all calls decode."""
    rng = random.Random(seed)
    async with caller(engine.url) as sender:
        sent = (sender.complete(fresh(rng, plan.prompt_tokens), plan.output_tokens) for _ in range(plan.batch))
        served = await asyncio.gather(*sent)
    gap_s = inter_token_s([one.stream for one in served])
    if gap_s is None:
        raise ValueError("the calls did not decode at the same time")
    return gap_s
