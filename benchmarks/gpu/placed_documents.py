"""What placement saves on two engines: questions about documents, placed by Plait or by round robin.

Both arms are sent the same calls at the same times, in turns, on empty caches. Two engines on one GPU take turns on it,
so a time is one of half an engine; computed tokens are exact.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.gpu.calls import Due, Served, caller, fresh, quantile
from benchmarks.gpu.gateways import gateway
from benchmarks.gpu.section import Figures, Fleet

ARMS = ("plait", "round_robin", "round_robin", "plait")
STARTED_S = 3.0
"""A gateway's start, and the last calls' end."""


@dataclass(frozen=True)
class Plan:
    """Documents, their length, calls a second, and each call's own tokens and output."""

    documents: int
    document_tokens: int
    rate_per_s: float
    question_tokens: int = 64
    output_tokens: int = 64


GPU = Plan(documents=16, document_tokens=10_000, rate_per_s=2.5)
CPU = Plan(documents=10, document_tokens=2_500, rate_per_s=0.8, output_tokens=8)


async def measure(plan: Plan, fleet: Fleet, seconds: float, figures: Figures) -> None:
    """Run the arms in turns."""
    calls = _calls(plan, seconds / len(ARMS) - STARTED_S)
    figures["plan"] = {"documents": plan.documents, "document tokens": plan.document_tokens, "calls an arm": len(calls)}
    runs = figures["runs"] = []
    for policy in ARMS:
        for engine in fleet.engines:
            engine.empty_cache()
        computed = sum(engine.computed_prompt_tokens() for engine in fleet.engines)
        async with gateway(fleet.engines, fleet.folder, policy=policy) as url, caller(url) as sender:
            answers = await sender.on_time(calls)
        computed = sum(engine.computed_prompt_tokens() for engine in fleet.engines) - computed
        runs.append(_figures(policy, answers, computed))
    figures["computed prompt tokens, round_robin / plait"] = _ratio(runs, "computed prompt tokens")
    figures["TTFT mean, round_robin / plait"] = _ratio(runs, "TTFT mean (s)")


def _calls(plan: Plan, seconds: float) -> list[Due]:
    rng = random.Random("documents")
    documents = [fresh(rng, plan.document_tokens) for _ in range(plan.documents)]
    calls, at_s = list[Due](), rng.expovariate(plan.rate_per_s)
    while at_s < seconds:
        prompt = [*rng.choice(documents), *fresh(rng, plan.question_tokens)]
        calls.append(Due(at_s, prompt, plan.output_tokens, {}))
        at_s += rng.expovariate(plan.rate_per_s)
    return calls


def _figures(policy: str, answers: Sequence[Served | str], computed: float) -> Figures:
    served = [one for one in answers if isinstance(one, Served)]
    ttfts_s = [one.ttft_s for one in served]
    return {
        "policy": policy,
        "calls": len(answers),
        "failed": [one for one in answers if isinstance(one, str)][:3],
        "computed prompt tokens": computed,
        "TTFT mean (s)": fmean(ttfts_s),
        "TTFT p90 (s)": quantile(ttfts_s, 0.9),
        "TPOT p50 (s)": quantile([one.tpot_s for one in served], 0.5),
    }


def _ratio(runs: Sequence[Figures], figure: str) -> float:
    theirs, ours = (sum(run[figure] for run in runs if run["policy"] == policy) for policy in ("round_robin", "plait"))
    return float(theirs / ours)
