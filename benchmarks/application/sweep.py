"""The runs of the experiments, in as many processes as asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.application.clients import Clients, Job
from benchmarks.application.experiments import EXPERIMENTS, Case, Workloads
from benchmarks.application.figures import Figures, figures
from benchmarks.application.systems import systems

SUSTAINED_TOKEN_S = 0.1
"""A rate is sustained while the mean latency an output token, of calls behind the warm-up, stays within this."""
RATES_PER_S = tuple(round(0.5 * 2 ** (step / 4), 3) for step in range(29))
"""Among which the sustained rate is looked for: 0.5 to 64, each 19 % above the one before."""
WARM_UP_SHARE = 0.25
"""Of the calls; at first nothing is cached."""


@dataclass(frozen=True, slots=True)
class Point:
    """A case under a system, and the kind of jobs that its figures are about."""

    case: Case
    system: str
    kind: str


Results = dict[Point, Figures]
Task = tuple[Case, str, tuple[int, ...]]
"""A case under a system, with these seeds together."""


class Runner:
    """Runs tasks; the traces are read once."""

    def __init__(self, traces: Path) -> None:
        self._workloads = Workloads(traces)

    def __call__(self, task: Task) -> dict[Point, Figures]:
        """The figures of a case under a system by kind of job, over the seeds."""
        case, system, seeds = task
        if EXPERIMENTS[case.experiment].sustained:
            rate_per_s, jobs = self._sustained(case, system)
            return {Point(case, system, "assistant"): figures(jobs, rate_per_s)}
        jobs = [job for seed in seeds for job in self._jobs(case, system, seed)]
        by_kind: dict[str, list[Job]] = {}
        for job in jobs:
            by_kind.setdefault(job.launch.kind, []).append(job)
        return {Point(case, system, kind): figures(those) for kind, those in by_kind.items()}

    def _jobs(self, case: Case, system: str, seed: int, rate_per_s: float | None = None) -> list[Job]:
        clients = Clients(systems()[system], EXPERIMENTS[case.experiment].machine)
        return clients.run(self._workloads.scenario(case, seed, rate_per_s))

    def _sustained(self, case: Case, system: str) -> tuple[float, list[Job]]:
        """The highest of `RATES_PER_S` that is sustained, by bisection, and the jobs at it; the lowest if none is."""
        low, high = 0, len(RATES_PER_S)
        best = self._warm(case, system, RATES_PER_S[low])
        while high - low > 1:
            middle = (low + high) // 2
            jobs = self._warm(case, system, RATES_PER_S[middle])
            if sum(job.normalised_s for job in jobs) / len(jobs) <= SUSTAINED_TOKEN_S:
                low, best = middle, jobs
            else:
                high = middle
        return RATES_PER_S[low], best

    def _warm(self, case: Case, system: str, rate_per_s: float) -> list[Job]:
        jobs = self._jobs(case, system, 0, rate_per_s)
        return jobs[round(WARM_UP_SHARE * len(jobs)) :]
