"""What it is worth to know where hits end: `python -m benchmarks windows`.

In virtual time: two engines that report, of which some layers have a sliding window, as Gemma 3 on vLLM. A prefix that
full attention has is a hit only where the window was kept, too. The oracle asks the engines for each hit when a call is
placed. A gateway that ignores reported ends takes all leading blocks for a hit. Loads are in the calls a second that
the oracle completes if all come at once. The first half of a run fills the caches and does not count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Final

from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from benchmarks.windowing.fleet import ENGINES, Load, Run, System
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import Experiment as Comparison
from plait.lab.simulation.compare import prepare
from plait.lab.simulation.simulate import CallRecord
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

WORKLOADS: Final[Mapping[str, int | None]] = {"sessions": 4, "documents": None}
"""The mean turns of a session. `documents` are single questions about long documents and tool lists."""
WINDOW_TOKENS: Final = 1_024
"""Gemma 3's."""
KV_TOKENS: Final = 350_000
WORKING_SET: Final = 1.5
"""All shared prefixes in units of one cache, of which windows take a part."""
LOAD: Final = 0.6
"""All at once, calls that share a prefix come together and hit more than at a rate: with .7, queues grow."""
SEEDS: Final = (1, 2, 3, 4, 5, 6)
CALLS: Final = 1200
QUICK_CALLS: Final = 300
WARM_UP: Final = 0.5

SYSTEMS: Final[tuple[System, ...]] = ("oracle", "reported", "ends ignored", "least outstanding")
MOST: Final = 1.03
"""Mean E2E of a gateway that is told of ends, over that of the oracle."""
MOST_OF_RIVAL: Final = 0.85
"""The same over least outstanding calls."""
LEAST_WITHIN: Final = 0.95


@dataclass(frozen=True, slots=True)
class Task:
    workload: str
    seed: int


@dataclass(frozen=True, slots=True)
class Figures:
    e2e_s: float
    """The mean, like `ttft_s`."""
    ttft_s: float
    hit_rate: float
    predicted_hit_rate: float
    within: float
    """The share of calls whose hit was predicted within a tree block."""


Found = Mapping[System, Figures]


@dataclass(frozen=True, slots=True)
class Plan:
    """Makes a runner in a worker process, of so many calls in a run."""

    calls: int
    built_in: bool = False
    """Run the built-in prompts, also where there are traces."""

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        return Runner(self.calls, None if self.built_in or not traces.is_dir() else traces)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks."""

    calls: int
    traces: Path | None

    def __call__(self, task: Task) -> Found:
        """The figures of each system."""
        asked = Comparison(
            traces=self.traces,
            engines=len(ENGINES),
            turns=WORKLOADS[task.workload],
            calls=self.calls,
            seed=task.seed,
            kv_tokens=None if self.traces is None else KV_TOKENS,
            working_set=WORKING_SET,
            window_tokens=WINDOW_TOKENS,
        )
        load = Load(asked, prepare(asked, _quiet))
        rate_per_s = LOAD * self.calls / max(record.finished_s for record in Run("oracle", load)())
        at_rate = replace(load, rate_per_s=rate_per_s)
        return {system: _summary(Run(system, at_rate)()[round(WARM_UP * self.calls) :]) for system in SYSTEMS}


def _summary(records: Sequence[CallRecord]) -> Figures:
    prompts, cached, predicted = (
        sum(getattr(record, name) for record in records)
        for name in ("prompt_tokens", "cached_tokens", "predicted_cached_tokens")
    )
    e2e_s, ttft_s = (fmean(getattr(record, name) for record in records) for name in ("e2e_s", "ttft_s"))
    within = fmean(abs(one.cached_tokens - one.predicted_cached_tokens) <= TREE_BLOCK_TOKENS for one in records)
    return Figures(e2e_s, ttft_s, cached / prompts, predicted / prompts, within)


QUICK: Final = Plan(QUICK_CALLS, built_in=True)
QUICK_TASKS: Final = (Task("sessions", 1), Task("documents", 1))


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, quick="one seed on the built-in prompts", seeds=SEEDS)
    made.add_argument("--calls", type=int, default=CALLS, help="of a run (default: %(default)s)")
    arguments = made.parse_args()
    plan, tasks = (QUICK, QUICK_TASKS) if arguments.quick else (Plan(arguments.calls), tasks_of(arguments.seeds))
    return conduct("windows", Experiment(tasks, plan, report), arguments)


def tasks_of(seeds: Sequence[int]) -> tuple[Task, ...]:
    """The longest first."""
    return tuple(Task(workload, seed) for workload in WORKLOADS for seed in seeds)


def report(found: Mapping[Task, Found]) -> Report:
    """A row for each workload: geometric means over the seeds."""
    return Report(
        lines=list(markdown(found)),
        claims=list(claims(found)),
        results=[
            {**asdict(task), "system": system, **asdict(figures)}
            for task, by_system in found.items()
            for system, figures in by_system.items()
        ],
    )


def claims(found: Mapping[Task, Found]) -> Iterator[Claim]:
    """For each workload. E2E scatters by a tenth from seed to seed: the oracle's is claimed of all seeds only."""
    bounds: Sequence[tuple[System, float, int]] = (
        ("least outstanding", MOST_OF_RIVAL, 1), ("oracle", MOST, len(SEEDS))
    )  # fmt: skip
    for workload, runs in _rows(found):
        within = fmean(run["reported"].within for run in runs)
        yield Claim("hits predicted within a tree block", within, least=LEAST_WITHIN, where=workload)
        for system, most, least_seeds in bounds:
            if len(runs) >= least_seeds:
                ratio = _mean(runs, "reported", "e2e_s") / _mean(runs, system, "e2e_s")
                yield Claim(f"mean E2E, reported / {system}", ratio, most=most, where=workload)


def markdown(found: Mapping[Task, Found]) -> Iterator[str]:
    """The oracle's mean E2E and TTFT, those of the others over them, and the hit rates: found, and predicted."""
    others = SYSTEMS[1:]
    rows = []
    for workload, runs in _rows(found):
        e2e, ttft = (
            [_mean(runs, one, name) / _mean(runs, "oracle", name) for one in others] for name in ("e2e_s", "ttft_s")
        )
        hits, predicted, within = (
            " / ".join(f"{fmean(getattr(run[one], name) for run in runs):.2f}" for one in SYSTEMS)
            for name in ("hit_rate", "predicted_hit_rate", "within")
        )
        first = f"{_mean(runs, 'oracle', 'e2e_s'):.2f} s, {_mean(runs, 'oracle', 'ttft_s'):.2f} s"
        ratios = [f"{one:.3f}, {other:.3f}" for one, other in zip(e2e, ttft, strict=True)]
        rows.append([workload, first, *ratios, hits, predicted, within])
    head = [
        *("workload", "E2E, TTFT of the oracle"),
        *(f"{one}, over it" for one in others),
        *("hits", "predicted", "within a block"),
    ]
    return table(head, rows)


def _rows(found: Mapping[Task, Found]) -> Iterator[tuple[str, list[Found]]]:
    """The runs of each workload."""
    for workload in dict.fromkeys(task.workload for task in found):
        yield workload, [of for task, of in found.items() if task.workload == workload]


def _mean(runs: Sequence[Found], system: System, name: str) -> float:
    return geometric_mean(getattr(run[system], name) for run in runs)


def _quiet(_what: str, _done: int, _of: int) -> None:
    """No progress."""


if __name__ == "__main__":
    sys.exit(main())
