"""Placement policies on hot shared prefixes, in virtual time: `python -m benchmarks hot_prefixes [--json PATH]`.

Repeated questions about documents and tool lists whose popularity follows Zipf's law, at rates up to 2.5 times round
robin's saturation: the policy that ships, E2, the least outstanding calls, LMetric, and llm-d's sticky prefixes. The
router and the engine cores are the real ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.placing.baselines import LMETRIC, STICKY
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import Experiment as Comparison
from plait.lab.simulation.compare import Workload, prepare, saturation_rate, simulate, summarise
from plait.lab.simulation.rivals import KNOWN
from plait.policy.placement.policies import by_name

OURS: Final = "plait"
POLICIES: Final = by_name(KNOWN[OURS], KNOWN["e2"], KNOWN["least_outstanding"], LMETRIC, STICKY)
RATES: Final = (0.9, 1.5, 2.0, 2.5)
SEEDS: Final = (1, 2, 3)
WITHIN: Final = 1.03
TTFT_GAIN: Final = 1.2


@dataclass(frozen=True, slots=True)
class Point:
    """A workload (`manuals` or `traces`) at a rate, in units of round robin's saturation, under a policy."""

    workload: str
    rate: float
    policy: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the seeds, in seconds."""

    ttft_s: float
    e2e_s: float
    ttft_p99_s: float
    hit_rate: float


Results = dict[Point, Figures]
Task = tuple[str, int]
"""A workload with a seed: all its rates and policies."""


class Runner:
    """Runs tasks; the workload of each is made once."""

    def __init__(self, traces: Path, experiment: Comparison, rates: Sequence[float]) -> None:
        self._traces = traces
        self._experiment = experiment
        self._rates = rates

    def __call__(self, task: Task) -> Results:
        """The figures at every rate under every policy."""
        name, seed = task
        experiment = replace(self._experiment, traces=None if name == "manuals" else self._traces, seed=seed)
        workload = prepare(experiment, _quiet)
        saturation_per_s = saturation_rate(experiment, workload, _quiet)
        return {
            Point(name, rate, policy): _figures(experiment, workload, policy, rate * saturation_per_s)
            for rate in self._rates
            for policy in POLICIES
        }


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Makes a runner in a worker process."""

    experiment: Comparison
    rates: tuple[float, ...]

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        return Runner(traces, self.experiment, self.rates)


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, seeds=SEEDS)
    made.add_argument("--calls", type=int, default=6000, help="of a run (default: %(default)s)")
    made.add_argument("--engines", type=int, default=4, help="default: %(default)s")
    made.add_argument("--profile", default="a6000-mistral-7b", help="default: %(default)s")
    made.add_argument("--rates", type=float, nargs="+", default=RATES, help="in round robin's saturation")
    made.add_argument("--no-admission", dest="admission", action="store_false", help="send calls as they arrive")
    arguments = made.parse_args()
    inputs = Comparison(
        calls=arguments.calls, engines=arguments.engines, profile=arguments.profile, admission=arguments.admission
    )
    names = ["manuals", *(["traces"] if arguments.traces.is_dir() else [])]
    tasks = [(name, seed) for name in names for seed in arguments.seeds]
    runner = NewRunner(inputs, tuple(arguments.rates))
    return conduct("hot_prefixes", Experiment(tasks, runner, partial(_report, inputs)), arguments)


def claims(results: Results) -> Iterator[Claim]:
    """Never more than 3 % behind in mean E2E, and in mean TTFT ahead of every single other policy over all points."""
    points = [point for point in results if point.policy == OURS]
    others = [policy for policy in POLICIES if policy != OURS]
    worst = max(
        (results[point].e2e_s / min(results[replace(point, policy=policy)].e2e_s for policy in others), _where(point))
        for point in points
    )
    yield Claim("mean E2E, plait / the best other, at the worst point", worst[0], most=WITHIN, where=worst[1])
    gains = {
        policy: math.exp(
            fmean(math.log(results[replace(point, policy=policy)].ttft_s / results[point].ttft_s) for point in points)
        )
        for policy in others
    }
    best = min(gains, key=lambda policy: gains[policy])
    gain = gains[best]
    yield Claim("mean TTFT, the best single other / plait, geometric mean", gain, least=TTFT_GAIN, where=best)


def markdown(results: Results) -> Iterator[str]:
    """A table of mean TTFT / mean E2E."""
    rows = []
    for point in results:
        if point.policy == OURS:
            row = [results[replace(point, policy=policy)] for policy in POLICIES]
            rows.append([_where(point), *(f"{figures.ttft_s:.3f} / {figures.e2e_s:.2f}" for figures in row)])
    return table(["workload, rate", *POLICIES], rows)


def sorted_points(found: Sequence[Results]) -> list[Point]:
    """All points, by workload and rate."""
    order = list(POLICIES)
    points = {point for results in found for point in results}
    return sorted(points, key=lambda point: (point.workload, point.rate, order.index(point.policy)))


def _figures(experiment: Comparison, workload: Workload, policy: str, rate_per_s: float) -> Figures:
    outcome = summarise(policy, simulate(experiment, workload, POLICIES[policy], rate_per_s, _quiet))
    return Figures(outcome.ttft_mean_s, outcome.e2e_mean_s, outcome.ttft_p99_s, outcome.hit_rate)


def _mean(runs: Sequence[Figures]) -> Figures:
    rows = [asdict(run) for run in runs]
    return Figures(**{name: fmean(row[name] for row in rows) for name in rows[0]})


def _where(point: Point) -> str:
    return f"{point.workload}, {point.rate:g}"


def _report(inputs: Comparison, found: Mapping[Task, Results]) -> Report:
    points = sorted_points([*found.values()])
    results = {point: _mean([some[point] for some in found.values() if point in some]) for point in points}
    return Report(
        lines=list(markdown(results)),
        claims=list(claims(results)),
        results=[{**asdict(point), **asdict(figures)} for point, figures in results.items()],
        inputs={**asdict(inputs), "policies": list(POLICIES)},
    )


def _quiet(_label: str, _done: int, _total: int) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
