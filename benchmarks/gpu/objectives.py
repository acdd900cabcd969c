"""Short calls with a TTFT and a TPOT beside long prompts: an engine with Plait's scheduler against a stock one.

Both are behind a gateway of their own with the same settings, are sent the same calls in turns, and have load one at a
time. A short call's TTFT is three times its unloaded one; its TPOT is the stock engine's 90th percentile.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.gpu.calls import Caller, Due, Served, caller, fresh, mean, quantile
from benchmarks.gpu.gateways import Settings, gateways
from benchmarks.gpu.section import Figures, Fleet

STOCK, OURS = "stock", "slo"
ARMS = (STOCK, OURS, OURS, STOCK)
TTFT_SHARE = 3.0
"""The objective, in unloaded TTFTs."""
PERIOD = 1.6
"""Unloaded TTFTs of a long prompt between two of them."""
LAST_S = 2.0
"""Of an arm: the last calls' end. What takes longer has not met its objectives."""
UNLOADED = 9
"""Short calls before each arm."""
LOADED_SHARE = 0.85
"""Of an arm's time is left after them."""


@dataclass(frozen=True)
class Plan:
    """The lengths of long and short calls, and the share of the engine's capacity that short prompts take."""

    long_tokens: int
    short_tokens: int = 500
    long_output_tokens: int = 64
    short_output_tokens: int = 32
    short_share: float = 0.2


GPU = Plan(long_tokens=16_000)
CPU = Plan(long_tokens=3_000, short_tokens=200, long_output_tokens=8, short_output_tokens=4)


@dataclass(frozen=True)
class _Unloaded:
    long_s: float
    short_s: float


async def measure(plan: Plan, fleet: Fleet, seconds: float, figures: Figures) -> None:
    """Run the arms in turns."""
    ends_s = time.monotonic() + seconds
    engines = {STOCK: fleet.stock, OURS: fleet.engines[0]}
    unloaded, tpot_s = None, None
    runs = figures["runs"] = []
    wanted = (Settings([engine], tokenizer=fleet.model, profile=fleet.profile) for engine in engines.values())
    async with gateways(fleet.folder, *wanted) as urls:
        arm_s = LOADED_SHARE * (ends_s - time.monotonic()) / len(ARMS) - LAST_S
        for number, system in enumerate(ARMS):
            async with caller(urls[list(engines).index(system)]) as sender:
                own = await _unloaded(plan, sender, f"unloaded {number}")
                unloaded = unloaded or own
                objectives_s = (TTFT_SHARE * unloaded.short_s, tpot_s)
                calls = _calls(plan, unloaded, arm_s, objectives_s, f"arm {number // 2}")
                answers = await sender.on_time(calls, arm_s + LAST_S)
            if tpot_s is None:
                tpot_s = quantile([one.tpot_s for one in _of(calls, answers, plan, is_long=False)], 0.9)
            promised_s = (objectives_s[0], tpot_s)
            figures["objectives"] = {"TTFT (s)": promised_s[0], "TPOT (s)": promised_s[1]}
            runs.append(_figures(system, plan, calls, answers, objectives_s=promised_s, unloaded=own))
    figures["attainment"] = {system: _mean(runs, system, "attainment") for system in (STOCK, OURS)}
    figures["slo / stock"] = {
        name: _mean(runs, OURS, name) / _mean(runs, STOCK, name)
        for name in ("short TTFT p50 (s)", "long TTFT p50 (s)", "long TPOT mean (s)", "output tokens/s")
        if _mean(runs, STOCK, name)
    }
    figures["attainment by the engine's own clock"] = engines[OURS].cache_state().scheduler.slo_attainment


async def _unloaded(plan: Plan, sender: Caller, seed: str) -> _Unloaded:
    """The median TTFT of calls that have the engine for themselves; the first of each kind does not count."""
    rng = random.Random(seed)
    found = []
    for tokens, count in ((plan.long_tokens, 3), (plan.short_tokens, UNLOADED)):
        served = [await sender.complete(fresh(rng, tokens), 2) for _ in range(count)]
        found.append(median(one.ttft_s for one in served[1:]))
    return _Unloaded(*found)


def _calls(
    plan: Plan, unloaded: _Unloaded, seconds: float, objectives_s: tuple[float, float | None], seed: str
) -> list[Due]:
    """Long prompts at a steady rate, and short calls that arrive at random."""
    rng, period_s = random.Random(seed), PERIOD * unloaded.long_s
    calls = [
        Due(number * period_s, fresh(rng, plan.long_tokens), plan.long_output_tokens, {})
        for number in range(max(1, int(seconds / period_s)))
    ]
    ttft_s, tpot_s = objectives_s
    headers = {"plait-slo-ttft-ms": f"{ttft_s * 1e3:.0f}"}
    headers |= {} if tpot_s is None else {"plait-slo-tpot-ms": f"{tpot_s * 1e3:.1f}"}
    rate_per_s = plan.short_share * plan.long_tokens / unloaded.long_s / plan.short_tokens
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        calls.append(Due(at_s, fresh(rng, plan.short_tokens), plan.short_output_tokens, headers))
        at_s += rng.expovariate(rate_per_s)
    return calls


def _of(calls: Sequence[Due], answers: Sequence[Served | str], plan: Plan, *, is_long: bool) -> list[Served]:
    pairs = zip(calls, answers, strict=True)
    return [one for due, one in pairs if isinstance(one, Served) and (len(due.prompt) == plan.long_tokens) == is_long]


def _figures(
    system: str,
    plan: Plan,
    calls: Sequence[Due],
    answers: Sequence[Served | str],
    *,
    objectives_s: tuple[float, float],
    unloaded: _Unloaded,
) -> Figures:
    shorts, longs = (_of(calls, answers, plan, is_long=is_long) for is_long in (False, True))
    served = [*shorts, *longs]
    ttft_s, tpot_s = objectives_s
    met = [one for one in shorts if one.ttft_s <= ttft_s and one.tpot_s <= tpot_s]
    sent = [due for due in calls if len(due.prompt) != plan.long_tokens]
    tokens = sum(one.stream.arrivals[-1][1] for one in served)
    ended_s = [one.stream.arrivals[-1][0] for one in served]
    took_s = max(ended_s, default=1.0) - min((one.stream.sent_s for one in served), default=0.0)
    return {
        "system": system,
        "short calls": len(shorts),
        "long calls": len(longs),
        "failed": dict(Counter(one.partition(":")[0] for one in answers if isinstance(one, str))),
        "unloaded TTFT (s)": {"short": unloaded.short_s, "long": unloaded.long_s},
        "attainment": len(met) / max(1, len(sent)),
        "TTFT attainment": sum(one.ttft_s <= ttft_s for one in shorts) / max(1, len(sent)),
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


def _mean(runs: Sequence[Figures], system: str, figure: str) -> float:
    return fmean(run[figure] for run in runs if run["system"] == system)
