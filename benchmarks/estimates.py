"""What wrong estimates of the engines' caches cost: `python -m benchmarks estimates`.

In virtual time: two engines without reports, as stock vLLM, behind a gateway with Plait's defaults. The engines have
less cache than they say, other clients use them too, their prefix caching is off, or a cache is lost unseen. The oracle
is the same gateway when the engines report their caches, so that each hit is known beforehand. A gateway that is not
told of hits has to keep its estimates. Loads are in the calls a second that the oracle completes on these engines if
all come at once. The first half of a run fills the caches and does not count.

A stock engine also counts its running and waiting calls. While some wait, the gateway takes the engine's slots as full
and keeps further calls, although a long prompt may be all that they wait for. That costs nothing here, because waiting
calls count as running, unless `--waiting` is given: where nothing is wrong, the estimates then decide as the oracle.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Final

import structlog

from benchmarks.estimating.fleet import ENGINES, Load, Run, System, Wrong
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import Experiment as Comparison
from plait.lab.simulation.compare import Workload, prepare
from plait.lab.simulation.simulate import CallRecord

WORKLOADS: Final[Mapping[str, int | None]] = {"sessions": 4, "documents": None}
"""The mean turns of a session. `documents` are single questions about long documents and tool lists."""
CASES: Final[Mapping[str, Wrong]] = {
    "nothing wrong": Wrong(),
    "half of the cache": Wrong(size=0.5),
    "a quarter of the cache": Wrong(size=0.25),
    "other clients": Wrong(others=True),
    "caching off in one": Wrong(uncached=1),
    "caching off in both": Wrong(uncached=2),
    "cache lost unseen": Wrong(lost=True),
}
KV_TOKENS: Final = 350_000
"""What an engine says of its cache. The longest document fills half of a quarter of it."""
WORKING_SET: Final = 1.5
"""All shared prefixes fit into both caches together, and not into one."""
LOAD: Final = 0.7
SEEDS: Final = (1, 2, 3, 4, 5, 6)
CALLS: Final = 1200
QUICK_CALLS: Final = 350
WARM_UP: Final = 0.5

SYSTEMS: Final[tuple[System, ...]] = ("oracle", "answers", "not told", "least outstanding")
MOST: Final = 1.10
"""Mean E2E of a gateway that learns from answers, over that of the oracle."""
MOST_OF_RIVAL: Final = 0.85
"""The same over least outstanding calls, which need no estimates."""


@dataclass(frozen=True, slots=True)
class Task:
    """All cases on a workload with a seed."""

    workload: str
    seed: int


@dataclass(frozen=True, slots=True)
class Figures:
    e2e_s: float
    """The mean, like `ttft_s`."""
    ttft_s: float
    hit_rate: float
    predicted_hit_rate: float


Found = Mapping[str, Mapping[System, Figures]]
"""By case."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Makes a runner in a worker process, of so many calls in a run."""

    calls: int
    cases: tuple[str, ...] = tuple(CASES)
    built_in: bool = False
    """Run the built-in prompts, also where there are traces."""
    waiting: bool = False
    """As in `Load`."""

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
        """The figures of each case and system."""
        asked = Comparison(
            traces=self.traces,
            engines=len(ENGINES),
            turns=WORKLOADS[task.workload],
            calls=2 * self.plan.calls,
            seed=task.seed,
            kv_tokens=None if self.traces is None else KV_TOKENS,
            working_set=WORKING_SET,
        )
        both = prepare(asked, _quiet)
        ours, theirs = (_part(both, which) for which in (slice(self.plan.calls), slice(self.plan.calls, None)))
        load = Load(asked, ours, theirs, waiting=self.plan.waiting)
        return {case: dict(_figures(CASES[case], load)) for case in self.plan.cases}


def _part(whole: Workload, which: slice) -> Workload:
    return replace(whole, calls=whole.calls[which], prompts=whole.prompts[which])


def _figures(wrong: Wrong, load: Load) -> Iterator[tuple[System, Figures]]:
    at_once = Run("oracle", wrong, load)()
    rate_per_s = LOAD * len(at_once) / max(record.finished_s for record in at_once)
    for system in SYSTEMS:
        records = Run(system, wrong, replace(load, rate_per_s=rate_per_s))()
        yield system, _summary(records[round(WARM_UP * len(records)) :])


def _summary(records: Sequence[CallRecord]) -> Figures:
    prompts, cached, predicted = (
        sum(getattr(record, name) for record in records)
        for name in ("prompt_tokens", "cached_tokens", "predicted_cached_tokens")
    )
    e2e_s, ttft_s = (fmean(getattr(record, name) for record in records) for name in ("e2e_s", "ttft_s"))
    return Figures(e2e_s, ttft_s, cached / prompts, predicted / prompts)


QUICK: Final = Plan(QUICK_CALLS, ("nothing wrong", "half of the cache"), built_in=True)
QUICK_TASKS: Final = (Task("sessions", 1), Task("documents", 1))


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, quick="two cases on the built-in prompts", seeds=SEEDS)
    made.add_argument("--calls", type=int, default=CALLS, help="of a run (default: %(default)s)")
    made.add_argument("--waiting", action="store_true", help="engines tell waiting calls from running ones")
    arguments = made.parse_args()
    plan, tasks = Plan(arguments.calls, waiting=arguments.waiting), tasks_of(arguments.seeds)
    if arguments.quick:
        plan, tasks = QUICK, QUICK_TASKS
    return conduct("estimates", Experiment(tasks, plan, report), arguments)


def tasks_of(seeds: Sequence[int]) -> tuple[Task, ...]:
    """The longest first."""
    return tuple(Task(workload, seed) for workload in WORKLOADS for seed in seeds)


def report(found: Mapping[Task, Found]) -> Report:
    """A row for each workload and case: geometric means over the seeds."""
    return Report(
        lines=list(markdown(found)),
        claims=list(claims(found)),
        results=[
            {**asdict(task), "case": case, "system": system, **asdict(figures)}
            for task, by_case in found.items()
            for case, by_system in by_case.items()
            for system, figures in by_system.items()
        ],
    )


def claims(found: Mapping[Task, Found]) -> Iterator[Claim]:
    """For each workload, where nothing is wrong, and over all cases in which something is.

    A case scatters by a fifth from seed to seed, so the bound against the oracle is claimed of all seeds only. The
    table has each case.
    """
    bounds: Sequence[tuple[System, float, int]] = (
        ("least outstanding", MOST_OF_RIVAL, 1), ("oracle", MOST, len(SEEDS))
    )  # fmt: skip
    for system, most, least_seeds in bounds:
        ratios: dict[str, list[float]] = {}
        for (workload, case), runs in _rows(found):
            if len(runs) >= least_seeds:
                where = workload if CASES[case] == Wrong() else f"{workload}, wrong"
                ratios.setdefault(where, []).append(_mean(runs, "answers", "e2e_s") / _mean(runs, system, "e2e_s"))
        for where, each in ratios.items():
            yield Claim(f"mean E2E, estimated / {system}", geometric_mean(each), most=most, where=where)


def markdown(found: Mapping[Task, Found]) -> Iterator[str]:
    """The oracle's mean E2E and TTFT, those of the others over them, and the hit rates: found, and predicted."""
    others = SYSTEMS[1:]
    rows = []
    for (workload, case), runs in _rows(found):
        ratios = {
            name: [_mean(runs, one, name) / _mean(runs, "oracle", name) for one in others]
            for name in ("e2e_s", "ttft_s")
        }
        hits, predicted = (
            [fmean(getattr(run[one], name) for run in runs) for one in SYSTEMS]
            for name in ("hit_rate", "predicted_hit_rate")
        )
        rows.append(
            [
                f"{workload}, {case}",
                f"{_mean(runs, 'oracle', 'e2e_s'):.2f} s, {_mean(runs, 'oracle', 'ttft_s'):.2f} s",
                *(f"{e2e:.2f}, {ttft:.2f}" for e2e, ttft in zip(*ratios.values(), strict=True)),
                " / ".join(f"{hit:.2f}" for hit in hits),
                " / ".join(f"{hit:.2f}" for hit in predicted),
            ]
        )
    head = [
        "workload, estimates",
        "E2E, TTFT of the oracle",
        *(f"{one}, over it" for one in others),
        "hits",
        "predicted",
    ]
    return table(head, rows)


def _rows(found: Mapping[Task, Found]) -> Iterator[tuple[tuple[str, str], list[Mapping[System, Figures]]]]:
    """The runs of each workload and case."""
    for workload in dict.fromkeys(task.workload for task in found):
        runs = [of for task, of in found.items() if task.workload == workload]
        for case in runs[0]:
            yield (workload, case), [of[case] for of in runs]


def _mean(runs: Sequence[Mapping[System, Figures]], system: System, name: str) -> float:
    return geometric_mean(getattr(run[system], name) for run in runs)


def _quiet(_what: str, _done: int, _of: int) -> None:
    """No progress."""


if __name__ == "__main__":
    sys.exit(main())
