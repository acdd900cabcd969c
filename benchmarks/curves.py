"""Policies over load, tiers over their size, a program's timeline, in virtual time: `python -m benchmarks curves`.

What docs/results.md draws and no other report has: README's comparison of policies at several loads, engines with KV
tiers of several sizes, and one chain of calls, sent as a program and chained by its client.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import structlog

from benchmarks.application.clients import Clients
from benchmarks.application.experiments import EXPERIMENTS, TRACE_FILES, Case, Workloads
from benchmarks.application.systems import OURS, THROUGHPUT, systems
from benchmarks.filling.systems import FleetSize
from benchmarks.filling.workloads import Workload, documents, video
from benchmarks.mixed_prompts import LONG_FILE
from benchmarks.placing.workloads import loogle
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from benchmarks.tiers import COMING_AND_GOING, HOST, LARGE, SHARE, open_loop
from plait.lab.commands.demo import QUICK_CALLS, TURNS
from plait.lab.simulation.compare import Experiment as Comparison
from plait.lab.simulation.compare import after_warm_up, prepare, saturation_rate, simulate, summarise

LOADS: Final = (0.3, 0.5, 0.7, 0.85, 1.0)
"""Of the calls a second that Plait completes if all come at once."""
LOAD_CALLS: Final = QUICK_CALLS

SIZES: Final = (0.0, 0.5, 1.0, 2.0, HOST, 8.0)
"""Of the tier, over the KV of its engine."""
TIER_CALLS: Final = 1_200
TIERED: Final[Mapping[str, Workload]] = {
    "documents that come and go": partial(video, document=COMING_AND_GOING),
    "documents": documents,
    "loogle": loogle,
}
"""Workloads whose shared prefixes exceed the engines' KV."""

CHAIN: Final = Case("chain", "output_tokens", 25)
SEEDS: Final = (1, 2)


@dataclass(frozen=True, slots=True)
class Task:
    """What is drawn for one seed: `loads` of a policy, `tiers` of a workload, or the `timeline` of a system."""

    curve: str
    of: str
    seed: int


Found = list[dict[str, Any]]
"""The points of a curve, each with its figures; of a timeline, the calls."""


def main() -> int:
    """Run, print, write; nothing is claimed."""
    made = parser(__doc__, quick="few calls and one seed: shows that it runs", seeds=SEEDS)
    made.add_argument("--only", nargs="+", choices=CURVES, default=list(CURVES), help="default: all")
    arguments = made.parse_args()
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    tasks = [task for curve in arguments.only for task in tasks_of(curve, seeds)]
    experiment = Experiment(tasks, NewRunner(quick=arguments.quick), report, (LONG_FILE, *TRACE_FILES))
    return conduct("curves", experiment, arguments)


def tasks_of(curve: str, seeds: tuple[int, ...]) -> Iterator[Task]:
    """All tasks of a curve. Timelines are of one run."""
    names, _ = CURVES[curve]
    for name in names:
        for seed in seeds if curve != "timeline" else seeds[:1]:
            yield Task(curve, name, seed)


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Makes a runner in a worker process."""

    quick: bool

    def __call__(self, traces: Path) -> Callable[[Task], Found]:
        """The runner."""
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        return partial(_run, traces, self.quick)


def _run(traces: Path, quick: bool, task: Task) -> Found:
    _, run = CURVES[task.curve]
    return run(task, traces, quick)


def _loads(task: Task, _traces: Path, quick: bool) -> Found:
    """README's comparison: the mean E2E and the p99 TTFT of a policy at each load."""
    plan = Comparison(calls=80 if quick else LOAD_CALLS, turns=TURNS, seed=task.seed)
    workload = prepare(plan, lambda *_: None)
    saturation_per_s = saturation_rate(plan, workload, lambda *_: None, OURS)
    found = []
    for load in LOADS:
        records = after_warm_up(simulate(plan, workload, task.of, load * saturation_per_s, lambda *_: None))
        one = summarise(task.of, records)
        found.append({"load": load, "e2e_s": one.e2e_mean_s, "ttft_p99_s": one.ttft_p99_s, "hit_rate": one.hit_rate})
    return found


def _tiers(task: Task, _traces: Path, quick: bool) -> Found:
    """The hit rate and the mean E2E of the same calls with each size of the tier, near saturation without one."""
    fleet, count = FleetSize(kv_tokens=LARGE.get(task.of)), 80 if quick else TIER_CALLS
    _, completed_per_s = open_loop(fleet, TIERED[task.of](count, inf, task.seed))
    coming = TIERED[task.of](count, SHARE * completed_per_s, task.seed)
    runs = {size: open_loop(replace(fleet, host=size), coming)[0] for size in SIZES}
    return [{"size": size, "hit_rate": one.hit_rate, "e2e_s": one.mean_s} for size, one in runs.items()]


def _timeline(task: Task, traces: Path, _quick: bool) -> Found:
    """The calls of one program: when each arrived, began to be computed, had its first token and ended, in seconds."""
    clients = Clients(systems()[task.of], EXPERIMENTS[CHAIN.experiment].machine)
    (job,) = clients.run(Workloads(traces).scenario(CHAIN, task.seed))
    calls = [
        {"call": name, "arrived_s": one.arrived_s, "began_s": one.admitted_s, "first_token_s": one.first_token_s,
         "ended_s": one.finished_s}
        for name, one in job.records.items()
    ]  # fmt: skip
    return [*calls, {"call": "the client has the last value", "ended_s": job.finished_s}]


CURVES: Final[Mapping[str, tuple[tuple[str, ...], Callable[[Task, Path, bool], Found]]]] = {
    "loads": (Comparison().policies, _loads),
    "tiers": (tuple(TIERED), _tiers),
    "timeline": ((OURS, THROUGHPUT), _timeline),
}
"""By name: of what each is drawn, and what runs a task."""


def report(found: Mapping[Task, Found]) -> Report:
    """The points. The table has the means of the curves over the seeds, at each load or size."""
    rows = [asdict(task) | point for task, points in found.items() for point in points]
    return Report(lines=list(_markdown(rows)), claims=[], results=rows)


def _markdown(rows: Found) -> Iterator[str]:
    drawn = [row for row in rows if "hit_rate" in row]
    points = dict.fromkeys((row["curve"], row["of"], row.get("load", row.get("size"))) for row in drawn)

    def cells(curve: str, of: str, at: Any) -> tuple[str, ...]:
        here = [row for row in drawn if (row["curve"], row["of"], row.get("load", row.get("size"))) == (curve, of, at)]
        means = (fmean(row[figure] for row in here) for figure in ("e2e_s", "hit_rate"))
        return curve, of, f"{at:g}", *(f"{mean:.3f}" for mean in means)

    yield from table(("curve", "of", "at", "mean E2E, s", "hit rate"), (cells(*point) for point in points))


if __name__ == "__main__":
    sys.exit(main())
