"""Short calls with a TTFT and a TPOT beside long prompts: an engine with Plait's scheduler against a stock one.

Both are behind a gateway of their own with the same settings, and have load one at a time: first and last the stock
engine, which is judged by every promise, and between them the other, once with each promise. Arrivals are the same each
time, and prompts are new. A promised TTFT is some unloaded ones of a short call.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.gpu.calls import Caller, Due, Served, caller, fresh, mean, quantile
from benchmarks.gpu.gateways import Settings, gateways
from benchmarks.gpu.section import Figures, Fleet

STOCK, OURS = "stock", "slo"
TTFT_SHARES = (4.0, 3.0)
"""Promised TTFTs, in unloaded ones. An engine that plans an iteration ahead takes one of them longer to begin."""
PERIOD = 1.6
"""Unloaded TTFTs of a long prompt between two of them."""
LAST_S = 2.0
"""Of an arm: the last calls' end. What takes longer has not met its objectives."""
UNLOADED = 9
"""Short calls on each engine before the arms."""
RATIOS = ("short TTFT p50 (s)", "long TTFT p50 (s)", "long TPOT mean (s)", "output tokens/s")
"""Figures that a promise's row has over the stock engine's."""
LOADED_SHARE = 0.95
"""The arms have this share of the time that is left then."""


@dataclass(frozen=True)
class Plan:
    """The lengths of long and short calls, promised TPOTs, and the share of the capacity that short prompts take."""

    long_tokens: int
    tpots_s: Sequence[float]
    short_tokens: int = 500
    long_output_tokens: int = 64
    short_output_tokens: int = 32
    short_share: float = 0.2


GPU = Plan(long_tokens=16_000, tpots_s=(0.027, 0.050, 0.032))
"""The shortest iteration with a prompt took 29 ms on an H200."""
CPU = Plan(long_tokens=3_000, tpots_s=(0.1, 1.0), short_tokens=200, long_output_tokens=8, short_output_tokens=4)


class Promise(NamedTuple):
    """What short calls are promised. `name` is its row's in the figures."""

    name: str
    ttft_s: float
    tpot_s: float

    @property
    def headers(self) -> dict[str, str]:
        return {"plait-slo-ttft-ms": f"{self.ttft_s * 1e3:.0f}", "plait-slo-tpot-ms": f"{self.tpot_s * 1e3:.1f}"}

    def kept(self, served: Sequence[Served]) -> int:
        """How many of these calls met both."""
        return sum(one.ttft_s <= self.ttft_s and one.tpot_s <= self.tpot_s for one in served)


@dataclass(frozen=True)
class _Unloaded:
    long_s: float
    short_s: float


async def measure(plan: Plan, fleet: Fleet, seconds: float, figures: Figures) -> None:
    """Run the arms. `figures` has the promises' rows after each."""
    ends_s = time.monotonic() + seconds
    engines = {STOCK: fleet.stock, OURS: fleet.engines[0]}
    wanted = (Settings([engine], tokenizer=fleet.model, profile=fleet.profile) for engine in engines.values())
    async with gateways(fleet.folder, *wanted) as urls, caller(urls[0]) as stock, caller(urls[1]) as ours:
        senders = {STOCK: stock, OURS: ours}
        unloaded = {system: await _unloaded(plan, sender, system) for system, sender in senders.items()}
        figures["unloaded TTFT (s)"] = {
            name: {"short": one.short_s, "long": one.long_s} for name, one in unloaded.items()
        }
        promises = promised(plan, unloaded[STOCK].short_s)
        arms = [(STOCK, promises[0]), *((OURS, promise) for promise in promises), (STOCK, promises[0])]
        arm_s = LOADED_SHARE * (ends_s - time.monotonic()) / len(arms) - LAST_S
        runs: list[Figures] = figures.setdefault("runs", [])
        for number, (system, promise) in enumerate(arms):
            calls = due_calls(plan, unloaded[STOCK].long_s, arm_s, promise, f"arm {number}")
            answers = await senders[system].on_time(calls, arm_s + LAST_S)
            judged = promises if system == STOCK else [promise]
            runs.append({"system": system, **_figures(plan, calls, answers, judged)})
            figures["promises"] = rows(promises, runs)
            figures["attainment by the engine's own clock"] = engines[OURS].cache_state().scheduler.slo_attainment


def promised(plan: Plan, unloaded_s: float) -> list[Promise]:
    """Each TPOT with each TTFT, given a short call's unloaded one."""
    return [
        Promise(
            f"TTFT x {share:g} ({share * unloaded_s * 1e3:.0f} ms), TPOT {tpot_s * 1e3:g} ms",
            share * unloaded_s,
            tpot_s,
        )
        for share in TTFT_SHARES
        for tpot_s in plan.tpots_s
    ]


def rows(promises: Sequence[Promise], runs: Sequence[Figures]) -> Figures:
    """By promise: the shares of short calls that met it, and what the others had for it, over the stock engine's."""
    stock = [run for run in runs if run["system"] == STOCK]
    found: Figures = {}
    for promise in promises:
        row: Figures = {"stock kept": fmean(run["kept"][promise.name] for run in stock)}
        for run in runs:
            if run["system"] == OURS and promise.name in run["kept"]:
                row["slo kept"] = run["kept"][promise.name]
                row["slo / stock"] = {
                    name: run[name] / fmean(one[name] for one in stock)
                    for name in RATIOS
                    if any(one[name] for one in stock)
                }
        found[promise.name] = row
    return found


async def _unloaded(plan: Plan, sender: Caller, seed: str) -> _Unloaded:
    """The median TTFT of calls that have the engine for themselves; the first of each kind does not count."""
    rng = random.Random(seed)
    found = []
    for tokens, count in ((plan.long_tokens, 3), (plan.short_tokens, UNLOADED)):
        served = [await sender.complete(fresh(rng, tokens), 2) for _ in range(count)]
        found.append(median(one.ttft_s for one in served[1:]))
    return _Unloaded(*found)


def due_calls(plan: Plan, long_s: float, seconds: float, promise: Promise, seed: str) -> list[Due]:
    """Long prompts at a steady rate, and short calls that arrive at random times, the same for each `seed`.

    `long_s` is a long prompt's unloaded TTFT.
    """
    rng, times, period_s = random.Random(seed), random.Random("arrivals"), PERIOD * long_s
    calls = [
        Due(number * period_s, fresh(rng, plan.long_tokens), plan.long_output_tokens, {})
        for number in range(max(1, int(seconds / period_s)))
    ]
    rate_per_s = plan.short_share * plan.long_tokens / long_s / plan.short_tokens
    at_s = times.expovariate(rate_per_s)
    while at_s < seconds:
        calls.append(Due(at_s, fresh(rng, plan.short_tokens), plan.short_output_tokens, promise.headers))
        at_s += times.expovariate(rate_per_s)
    return calls


def _of(calls: Sequence[Due], answers: Sequence[Served | str], plan: Plan, *, is_long: bool) -> list[Served]:
    pairs = zip(calls, answers, strict=True)
    return [one for due, one in pairs if isinstance(one, Served) and (len(due.prompt) == plan.long_tokens) == is_long]


def _figures(plan: Plan, calls: Sequence[Due], answers: Sequence[Served | str], judged: Sequence[Promise]) -> Figures:
    shorts, longs = (_of(calls, answers, plan, is_long=is_long) for is_long in (False, True))
    served = [*shorts, *longs]
    sent = max(1, sum(len(due.prompt) != plan.long_tokens for due in calls))
    tokens = sum(one.stream.arrivals[-1][1] for one in served)
    ended_s = [one.stream.arrivals[-1][0] for one in served]
    took_s = max(ended_s, default=1.0) - min((one.stream.sent_s for one in served), default=0.0)
    return {
        "short calls": len(shorts),
        "long calls": len(longs),
        "failed": dict(Counter(one.partition(":")[0] for one in answers if isinstance(one, str))),
        "kept": {promise.name: promise.kept(shorts) / sent for promise in judged},
        **_times("short", shorts),
        **_times("long", longs),
        "output tokens/s": tokens / took_s,
    }


def _times(kind: str, served: Sequence[Served]) -> Figures:
    ttfts_s, tpots_s = [one.ttft_s for one in served], [one.tpot_s for one in served]
    return {
        f"{kind} TTFT p50 (s)": quantile(ttfts_s, 0.5),
        f"{kind} TTFT p90 (s)": quantile(ttfts_s, 0.9),
        f"{kind} TPOT mean (s)": mean(tpots_s),
        f"{kind} TPOT p50 (s)": quantile(tpots_s, 0.5),
        f"{kind} TPOT p99 (s)": quantile(tpots_s, 0.99),
    }
