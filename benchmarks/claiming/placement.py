"""What is claimed of placement on shared prefixes, against round robin and E2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final

from benchmarks.placing.policy_report import LIMITS
from benchmarks.placing.policy_runs import BASE, OURS, RATES, Figures, Runs, Task
from plait.lab.simulation.claim import Claim

E2: Final = "e2"
PLACEMENT_POLICIES: Final = (OURS, BASE, E2)
NEAR_ROUND_ROBIN: Final = f"0.9 {BASE}"
TIMES_FASTER: Final[Mapping[str, float]] = {"video": 2.0, "loogle": 4.0, "tools": 1.5}
"""Mean E2E of round robin over ours, near round robin's saturation."""
WITHIN: Final = LIMITS["e2e_s"][2]
"""What ours may be behind E2 at any load."""


def placement_claims(found: Mapping[Task, Runs]) -> Iterator[Claim]:
    """Mean E2E of each workload, over the seeds."""
    for workload in dict.fromkeys(task.workload for task in found):
        for load in RATES:
            runs = [by_load[load] for task, by_load in found.items() if task.workload == workload]
            if load == NEAR_ROUND_ROBIN:
                yield _at_least(workload, load, BASE, _ratio(runs, BASE), TIMES_FASTER[workload])
            yield _at_least(workload, load, E2, _ratio(runs, E2), 1 / WITHIN)


def _ratio(runs: Sequence[Mapping[str, Figures]], policy: str) -> float:
    """The mean E2E of a policy over ours."""
    theirs, ours = (fmean(figures[one].e2e_s for figures in runs) for one in (policy, OURS))
    return theirs / ours


def _at_least(workload: str, load: str, policy: str, value: float, least: float) -> Claim:
    return Claim(f"mean E2E, {policy} / {OURS}, {workload}, {load}", value, least=least)
