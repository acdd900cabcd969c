"""Placement by data-parallel rank, against servers that balance by themselves: `python -m benchmarks ranks`.

In virtual time: one server of eight ranks, and two of four, whose ranks step together as with experts, or not. The
servers' own balancing is vLLM's, behind a gateway that knows the addresses alone and sends each call at once. SMG's
tree is its cache-aware policy with an engine for each rank. Loads are in the calls a second that round robin over the
ranks completes if all come at once. The first half of a run fills the caches and does not count.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Final, Literal

import structlog

from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import OURS, Workload, prepare, saturation_rate, simulate
from plait.lab.simulation.compare import Experiment as Comparison
from plait.lab.simulation.shared_prefixes import Kind

WORKLOADS: Final[Mapping[str, tuple[tuple[Kind, ...], int | None]]] = {
    "tools": (("tools",), None),
    "sessions": (("document", "tools"), 3),
}
"""The kinds of shared prefixes, and the mean turns of a session."""
RANKS: Final = 8
SERVERS: Final = (1, 2)
"""The ranks are in so many servers."""
LOADS: Final = (0.8, 1.5)
SEEDS: Final = (1, 2)
WORKING_SET: Final = 4.0
"""The shared prefixes fill half of all caches."""
CALLS: Final = 6000
"""Of a run. The servers' own balancing cannot keep up with either load, so its line grows with the run."""
QUICK_CALLS: Final = 700
WARM_UP: Final = 0.5

System = Literal["by rank", "own balancing", "SMG's tree"]
RIVALS: Final[tuple[System, ...]] = ("own balancing", "SMG's tree")
OF_OWN: Final = {True: 0.25, False: 0.35}
"""Mean E2E of placement by rank over the servers' own balancing, in lockstep and without."""
OF_SMG: Final = 1.02


@dataclass(frozen=True, slots=True)
class Task:
    """All servers and loads on a workload with a seed."""

    workload: str
    seed: int


@dataclass(frozen=True, slots=True)
class Cell:
    """So many servers, with ranks that step together or not, at a load."""

    servers: int
    lockstep: bool
    load: float

    def __str__(self) -> str:
        how = "lockstep" if self.lockstep else "each by itself"
        return f"{self.servers} x {RANKS // self.servers}, {how}, {self.load:g}"


@dataclass(frozen=True, slots=True)
class Figures:
    e2e_s: float
    """The mean."""
    hit_rate: float


Found = Mapping[Cell, Mapping[System, Figures]]


@dataclass(frozen=True, slots=True)
class Plan:
    """Makes a runner in a worker process, of so many calls in a run."""

    calls: int
    cells: tuple[Cell, ...]
    built_in: bool = False
    """Run the built-in prompts, also where there are traces."""

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        return Runner(self, None if self.built_in or not traces.is_dir() else traces)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks."""

    plan: Plan
    traces: Path | None

    def __call__(self, task: Task) -> Found:
        """The figures of each cell and system."""
        kinds, turns = WORKLOADS[task.workload]
        asked = Comparison(
            traces=self.traces,
            kinds=kinds,
            turns=turns,
            calls=self.plan.calls,
            seed=task.seed,
            working_set=WORKING_SET,
        )
        workload = prepare(asked, _quiet)
        found: dict[Cell, dict[System, Figures]] = {}
        saturations: dict[tuple[int, bool], float] = {}
        for cell in self.plan.cells:
            fleet = replace(asked, engines=cell.servers, ranks=RANKS // cell.servers, lockstep=cell.lockstep)
            kind = (cell.servers if cell.lockstep else 1, cell.lockstep)  # a rank by itself has nothing of its server
            if kind not in saturations:
                saturations[kind] = saturation_rate(fleet, workload, _quiet)
            rate_per_s = cell.load * saturations[kind]
            own = replace(fleet, balanced=True, admission=False)
            same = found.get(Cell(1, cell.lockstep, cell.load)) if kind[0] != cell.servers else None
            found[cell] = {
                "by rank": same["by rank"] if same else _run(fleet, workload, OURS, rate_per_s),
                "own balancing": _run(own, workload, "least_outstanding", rate_per_s),
                "SMG's tree": same["SMG's tree"] if same else _run(fleet, workload, "smg", rate_per_s),
            }
        return found


def _run(fleet: Comparison, workload: Workload, policy: str, rate_per_s: float) -> Figures:
    records = simulate(fleet, workload, policy, rate_per_s, _quiet)
    counted = records[round(WARM_UP * len(records)) :]
    cached, prompts = (sum(getattr(one, name) for one in counted) for name in ("cached_tokens", "prompt_tokens"))
    return Figures(fmean(one.e2e_s for one in counted), cached / prompts)


def cells(servers: Sequence[int] = SERVERS) -> tuple[Cell, ...]:
    """All cells, those of one server first."""
    return tuple(Cell(one, lockstep, load) for one in servers for lockstep in (True, False) for load in LOADS)


QUICK: Final = Plan(QUICK_CALLS, (Cell(1, lockstep=True, load=LOADS[0]),), built_in=True)
QUICK_TASKS: Final = (Task("tools", 1),)


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, quick="one cell on the built-in prompts", seeds=SEEDS)
    made.add_argument("--calls", type=int, default=CALLS, help="of a run (default: %(default)s)")
    arguments = made.parse_args()
    plan, tasks = Plan(arguments.calls, cells()), tasks_of(arguments.seeds)
    if arguments.quick:
        plan, tasks = QUICK, QUICK_TASKS
    return conduct("ranks", Experiment(tasks, plan, report), arguments)


def tasks_of(seeds: Sequence[int]) -> tuple[Task, ...]:
    """The longest first."""
    return tuple(Task(workload, seed) for workload in ("sessions", "tools") for seed in seeds)


def report(found: Mapping[Task, Found]) -> Report:
    """A row for each workload and cell: geometric means over the seeds."""
    return Report(
        lines=list(markdown(found)),
        claims=list(claims(found)),
        results=[
            {**asdict(task), **asdict(cell), "system": system, **asdict(figures)}
            for task, by_cell in found.items()
            for cell, by_system in by_cell.items()
            for system, figures in by_system.items()
        ],
    )


def claims(found: Mapping[Task, Found]) -> Iterator[Claim]:
    """The bounds on geometric means over workloads, servers, loads and seeds."""
    for lockstep, most in OF_OWN.items():
        for rival, bound in zip(RIVALS, (most, OF_SMG), strict=True):
            ratios = [ratio for of in found.values() for ratio in _ratios(of, rival, lockstep=lockstep)]
            if ratios:
                where = "lockstep" if lockstep else "ranks each by itself"
                yield Claim(f"mean E2E, by rank / {rival}", geometric_mean(ratios), most=bound, where=where)


def _ratios(found: Found, rival: System, *, lockstep: bool) -> Iterator[float]:
    for cell, systems in found.items():
        if cell.lockstep == lockstep:
            yield systems["by rank"].e2e_s / systems[rival].e2e_s


def markdown(found: Mapping[Task, Found]) -> Iterator[str]:
    """Mean E2E by rank, how it compares, and the share of prompt tokens that was cached with each system."""
    rows = []
    for workload in dict.fromkeys(task.workload for task in found):
        runs = [of for task, of in found.items() if task.workload == workload]
        for cell in runs[0]:
            systems = [of[cell] for of in runs]
            ours = geometric_mean(one["by rank"].e2e_s for one in systems)
            ratios = [ours / geometric_mean(one[rival].e2e_s for one in systems) for rival in RIVALS]
            hits = [fmean(one[system].hit_rate for one in systems) for system in ("by rank", *RIVALS)]
            rows.append(
                [
                    f"{workload}, {cell}",
                    f"{ours:.2f} s",
                    *(f"{ratio:.2f}" for ratio in ratios),
                    " / ".join(f"{hit:.3f}" for hit in hits),
                ]
            )
    head = ["workload, servers x ranks, load", "mean E2E by rank", *(f"over {rival}" for rival in RIVALS), "hit rates"]
    return table(head, rows)


def _quiet(_what: str, _done: int, _of: int) -> None:
    """No progress."""


if __name__ == "__main__":
    sys.exit(main())
