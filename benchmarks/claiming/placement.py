"""What is claimed of placement on shared prefixes, against round robin, E2 and what other gateways ship."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Final

from benchmarks.placing.policy_report import LIMITS
from benchmarks.placing.policy_runs import BASE, OURS, RATES, Figures, Runs, Task
from benchmarks.preble import NOT_BEHIND
from plait.lab.simulation.claim import Claim

RIVALS: Final = ("e2", "smg", "llmd", "llmd_latency", "kv_aware", "lmetric")
"""Policies that know the caches: Preble's, and those of SMG, llm-d, vllm-router and LMetric."""
PLACEMENT_POLICIES: Final = (OURS, BASE, *RIVALS)
NEAR_ROUND_ROBIN: Final = f"0.9 {BASE}"
TIMES_FASTER: Final[Mapping[str, float]] = {"video": 2.0, "loogle": 4.0, "tools": 1.5}
"""Mean E2E of round robin over ours, near round robin's saturation."""
WITHIN: Final = LIMITS["e2e_s"][2]
"""What ours may be behind the best rival at any load, as in the worst cell of all that `policies` has."""


def placement_claims(found: Mapping[Task, Runs]) -> Iterator[Claim]:
    """Mean E2E of each workload over the seeds, and over the best rival in the geometric mean of all loads."""
    over_best = []
    for workload in dict.fromkeys(task.workload for task in found):
        for load in RATES:
            runs = [by_load[load] for task, by_load in found.items() if task.workload == workload]
            if load == NEAR_ROUND_ROBIN:
                least = TIMES_FASTER[workload]
                yield Claim(f"mean E2E, {BASE} / {OURS}, {workload}, {load}", _ratio(runs, BASE), least=least)
            ratios = {rival: _ratio(runs, rival) for rival in RIVALS}
            best = min(ratios, key=ratios.__getitem__)
            name = f"mean E2E, the best of {len(RIVALS)} rivals / {OURS}, {workload}, {load} ({best})"
            yield Claim(name, ratios[best], least=1 / WITHIN)
            over_best.append(ratios[best])
    name = f"mean E2E, the best of {len(RIVALS)} rivals at each load / {OURS}, geometric mean"
    yield Claim(name, geometric_mean(over_best), least=NOT_BEHIND)


def _ratio(runs: Sequence[Mapping[str, Figures]], policy: str) -> float:
    """The mean E2E of a policy over ours."""
    theirs, ours = (fmean(figures[one].e2e_s for figures in runs) for one in (policy, OURS))
    return theirs / ours
