"""What placement saves on two engines: questions about documents, placed by Plait or by round robin.

Both arms are sent the same calls at the same times, in turns, on empty caches. Two engines on one GPU take turns on it,
so a time is one of half an engine; computed tokens are exact.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.calls import Due, Served, caller, fresh, mean, quantile
from benchmarks.gpu.gateways import Settings, gateways
from benchmarks.gpu.section import Figures, Fleet

ARMS = ("plait", "round_robin", "round_robin", "plait")
LAST_S = 3.0
"""Of an arm: the last calls' end."""


@dataclass(frozen=True)
class Plan:
    """Documents, their length, calls a second, and each call's own tokens and output."""

    documents: int
    document_tokens: int
    rate_per_s: float
    question_tokens: int = 64
    output_tokens: int = 64


GPU = Plan(documents=16, document_tokens=10_000, rate_per_s=2.5)
CPU = Plan(documents=7, document_tokens=1_200, rate_per_s=0.8, output_tokens=4)


async def measure(plan: Plan, fleet: Fleet, seconds: float, figures: Figures) -> None:
    """Run the arms in turns."""
    ends_s = time.monotonic() + seconds
    policies = list(dict.fromkeys(ARMS))
    runs = figures["runs"] = []
    async with gateways(
        fleet.folder, *(Settings(fleet.engines, policy, profile=fleet.profile) for policy in policies)
    ) as urls:
        arm_s = (ends_s - time.monotonic()) / len(ARMS) - LAST_S
        calls = _calls(plan, arm_s)
        figures["plan"] = {"documents": plan.documents, "document tokens": plan.document_tokens, "seconds": arm_s}
        for policy in ARMS:
            computed = fleet.emptied()
            async with caller(urls[policies.index(policy)]) as sender:
                answers = await sender.on_time(calls, arm_s + LAST_S)
            runs.append(_figures(policy, answers, fleet.computed_prompt_tokens() - computed))
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
        "failed": dict(Counter(one.partition(":")[0] for one in answers if isinstance(one, str))),
        "computed prompt tokens": computed,
        "TTFT mean (s)": mean(ttfts_s),
        "TTFT p90 (s)": quantile(ttfts_s, 0.9),
        "TPOT p50 (s)": quantile([one.tpot_s for one in served], 0.5),
    }


def _ratio(runs: Sequence[Figures], figure: str) -> float:
    theirs, ours = (sum(run[figure] for run in runs if run["policy"] == policy) for policy in ("round_robin", "plait"))
    return float(theirs / ours)
