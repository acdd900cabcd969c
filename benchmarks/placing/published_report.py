"""Figure 3 of Preble on its published workloads: the runs, what each policy takes over ours, and verdicts by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.filling.systems import FleetSize, simulated
from benchmarks.placing.policy_runs import BASE, OURS, Figures, figures, policy_of
from benchmarks.placing.preble_published import LOADS, come
from benchmarks.running.report import Report, table
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.config.sections import AdmissionConfig
from plait.lab.simulation.claim import Claim

ENGINES: Final[tuple[int, ...]] = (2, 4)
SEEDS: Final = (1, 2, 3)
RIVALS: Final = (BASE, "e2", "smg", "llmd", "llmd_latency", "lmetric")
LEVEL: Final = 1.03
"""Mean E2E of two policies that are within this of each other differs too little to tell."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run. The `load` is in calls a second of a pair of engines."""

    workload: str
    engines: int
    load: float
    seed: int
    policy: str


Found = Mapping[Task, Figures]


class Standing(StrEnum):
    """How ours is beside another policy."""

    AHEAD = "ahead"
    LEVEL = "level"
    BEHIND = "behind"

    @classmethod
    def of(cls, by_seed: Sequence[float]) -> Standing:
        """By how many times as long the other takes with each seed: the mean tells, if all seeds agree on the sign."""
        mean = geometric(by_seed)
        if mean > LEVEL and min(by_seed) > 1:
            return cls.AHEAD
        if mean < 1 / LEVEL and max(by_seed) < 1:
            return cls.BEHIND
        return cls.LEVEL


@dataclass(frozen=True, slots=True)
class Times:
    """How many times as long a policy takes as ours, in mean E2E with the same seed."""

    found: Found
    workload: str
    engines: int

    @property
    def loads(self) -> list[float]:
        """Those that were run."""
        return list(dict.fromkeys(task.load for task in self._tasks()))

    def at(self, load: float, policy: str) -> list[float]:
        """At a load, by seed."""
        return [
            self.found[task].e2e_s / self.found[Task(self.workload, self.engines, load, task.seed, OURS)].e2e_s
            for task in self._tasks()
            if (task.load, task.policy) == (load, policy)
        ]

    def over_loads(self, policy: str) -> list[float]:
        """The geometric mean over the loads, by seed."""
        return [geometric(of_seed) for of_seed in zip(*(self.at(load, policy) for load in self.loads), strict=True)]

    def best(self, policy: str) -> list[float]:
        """At the load that gains most in the mean of the seeds, by seed."""
        return max((self.at(load, policy) for load in self.loads), key=geometric)

    def mean(self, load: float, policy: str, field: str) -> float:
        """A figure of a policy at a load, in the mean over the seeds."""
        return fmean(
            getattr(self.found[task], field) for task in self._tasks() if (task.load, task.policy) == (load, policy)
        )

    def _tasks(self) -> list[Task]:
        return [task for task in self.found if (task.workload, task.engines) == (self.workload, self.engines)]


def tasks_of(workloads: Sequence[str], engines: Sequence[int], seeds: Sequence[int]) -> list[Task]:
    """The first seed of all before the second; the policies one after the other, so that calls are made once."""
    return [
        Task(workload, count, load, seed, policy)
        for seed in seeds
        for workload in LOADS
        if workload in workloads
        for count in engines
        for load in LOADS[workload]
        for policy in (OURS, *RIVALS)
    ]


def runner(_traces: Path) -> Callable[[Task], Figures]:
    """Runs tasks."""
    return run


def run(task: Task) -> Figures:
    """The figures of a run, with admission as it ships."""
    fleet, most_s = FleetSize(engines=task.engines), AdmissionConfig().max_wait_s
    _, simulation = simulated(fleet, policy_of(task.policy), AHEAD_S, most_s)
    counted_s = come(simulation, task.workload, task.engines, task.load, task.seed)
    return figures(simulation, counted_s)


def report(paper: Mapping[str, float], not_behind: float, found: Found) -> Report:
    """All figures, and where ours stands beside each policy and beside the factors of the `paper`.

    The claims are those of our own generators: round robin takes as many times as long as in the paper, and no other
    policy less than `not_behind` of our mean E2E.
    """
    cells = [Times(found, *cell) for cell in dict.fromkeys((task.workload, task.engines) for task in found)]
    over = [f"{rival} / {OURS}" for rival in RIVALS]
    return Report(
        lines=[
            *table(["workload, engines, load a pair", "mean E2E, s", *over, "hits", *RIVALS], _rows(cells)),
            "",
            *table(["workload, engines", *over, "paper", "at best", ""], _verdicts(cells, paper)),
        ],
        claims=[claim for cell in cells for claim in _claims(cell, paper, not_behind)],
        results=[{**asdict(task), **asdict(one)} for task, one in found.items()],
    )


def _rows(cells: Sequence[Times]) -> Iterator[list[str]]:
    """What each load came to."""
    for cell in cells:
        for load in cell.loads:
            ours_s = cell.mean(load, OURS, "e2e_s")
            times = (f"{geometric(cell.at(load, rival)):.2f}" for rival in RIVALS)
            hits = (f"{cell.mean(load, policy, 'hit_rate'):.2f}" for policy in (OURS, *RIVALS))
            yield [f"{cell.workload}, {cell.engines}, {load:g}/s", f"{ours_s:.2f}", *times, *hits]


def _verdicts(cells: Sequence[Times], paper: Mapping[str, float]) -> Iterator[list[str]]:
    """Over all loads, with the ends of the seeds."""
    for cell in cells:
        beside = []
        for rival in RIVALS:
            by_seed = cell.over_loads(rival)
            ends = f"{geometric(by_seed):.2f} ({min(by_seed):.2f} to {max(by_seed):.2f})"
            beside.append(f"{ends} {Standing.of(by_seed)}")
        best, least = geometric(cell.best(BASE)), paper[cell.workload]
        reached = "reached" if best >= least else "short"
        yield [f"{cell.workload}, {cell.engines}", *beside, f"{least:g}", f"{best:.2f}", reached]


def _claims(cell: Times, paper: Mapping[str, float], not_behind: float) -> Iterator[Claim]:
    where = f"{cell.workload}, {cell.engines} engines"
    best = f"{where}: mean E2E, {BASE} / {OURS}, at the load that gains most"
    by_seed = cell.best(BASE)
    yield Claim(best, geometric(by_seed), least=paper[cell.workload], by_seed=tuple(by_seed))
    for rival in RIVALS[1:]:
        name = f"{where}: mean E2E, {rival} / {OURS}, geometric mean of the loads"
        by_seed = cell.over_loads(rival)
        yield Claim(name, geometric(by_seed), least=not_behind, by_seed=tuple(by_seed))


def geometric(values: Sequence[float]) -> float:
    """The geometric mean."""
    return exp(fmean(map(log, values)))
