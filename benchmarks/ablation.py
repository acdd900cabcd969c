"""What each mechanism of placement gains, in virtual time: `python -m benchmarks ablation [--json PATH] [--quick]`.

The tool lists of ToolBench with a popularity of Zipf 1.1, as in Preble's ablation (section 4.4): round robin, then E2,
shift and replicas, decode balance, and the engines' priority groups, each added to the one before. Then the policy that
ships, whole and with each part of its sum left out. Without traces, the built-in catalogues are used.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import nextafter
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.placing.steps import OURS, SHIPPED, STEPS, TERM_STEPS, Step
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report
from plait.backends.profiles import load_profile
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import Experiment as Comparison
from plait.lab.simulation.compare import Workload, prepare, saturation_rate, simulate, summarise
from plait.lab.simulation.simulate import CallRecord
from plait.policy.costs.cost_model import CostModel
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

RATES: Final = (0.9, 1.2, 1.5)
SEEDS: Final = (1, 2, 3)
CALLS: Final = 12_000
WINDOW_S: Final = 30.0
"""H: a run lasts three to five of these. With 180 s it would end before the first window has passed."""
WARM_UP_SHARE: Final = 0.25
"""The first calls of a run, for which the caches fill, do not count."""
QUICK_CALLS: Final = 300
SAME: Final = nextafter(1.0, 2.0)
"""A step has to be better than the one before: at least so many times."""
WITHIN: Final = 1.03
"""A part of the sum is worth keeping if no other sum is more than 3 % faster."""


@dataclass(frozen=True, slots=True)
class Point:
    """A rate, in units of round robin's saturation, under a step's system."""

    rate: float
    step: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the seeds. Times in seconds. `added_share` of the calls were placed by what the step adds."""

    ttft_s: float
    ttft_p99_s: float
    e2e_s: float
    e2e_p99_s: float
    hit_rate: float
    added_share: float
    busiest_share: float
    """The share of the calls on the engine with the most."""
    decode_share: float
    """The share of decoding in the load as E2 counts it: each answer as if it were generated alone."""


Results = Mapping[Point, Figures]
Task = tuple[int, float]
"""A seed and a rate."""


class Runner:
    """Runs every system at one rate on the workload of one seed."""

    def __init__(self, experiment: Comparison) -> None:
        self._experiment = experiment
        self._seed: int | None = None
        self._workload: Workload | None = None
        self._saturation_per_s = 0.0

    def __call__(self, task: Task) -> dict[Point, Figures]:
        """The figures of each system."""
        seed, rate = task
        experiment = replace(self._experiment, seed=seed)
        if self._workload is None or seed != self._seed:
            self._seed, self._workload = seed, prepare(experiment, _quiet)
            fcfs = replace(experiment, scheduler=STEPS["round robin"].scheduler)
            self._saturation_per_s = saturation_rate(fcfs, self._workload, _quiet)
        return {
            Point(rate, step.name): _figures(experiment, self._workload, step, rate * self._saturation_per_s)
            for step in STEPS.values()
        }


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Makes a runner in a worker process."""

    experiment: Comparison

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        return Runner(replace(self.experiment, traces=traces if traces.is_dir() else None))


def main() -> int:
    """Run, print, write; returns 1 if a claim fails. A step that does not help says what it did, and fails nothing."""
    made = parser(__doc__, quick=f"{QUICK_CALLS} calls and one seed: shows that it runs", seeds=SEEDS)
    made.add_argument("--calls", type=int, default=CALLS, help="of a run (default: %(default)s)")
    made.add_argument("--engines", type=int, default=4, help="default: %(default)s")
    made.add_argument("--profile", default="a6000-mistral-7b", help="default: %(default)s")
    made.add_argument("--rates", type=float, nargs="+", default=RATES, help="in round robin's saturation")
    made.add_argument("--no-admission", dest="admission", action="store_false", help="send calls as they arrive")
    arguments = made.parse_args()
    return conduct("ablation", experiment(arguments), arguments)


def experiment(arguments: argparse.Namespace) -> Experiment[Task, Results]:
    """All systems at each rate, on the workload of each seed."""
    calls, seeds = (QUICK_CALLS, (1,)) if arguments.quick else (arguments.calls, arguments.seeds)
    inputs = Comparison(
        calls=calls,
        engines=arguments.engines,
        profile=arguments.profile,
        kinds=("tools",),
        window_s=WINDOW_S,
        admission=arguments.admission,
    )
    tasks = [(seed, rate) for seed in seeds for rate in arguments.rates]
    return Experiment(tasks, NewRunner(inputs), partial(_report, inputs))


def means(found: Mapping[Task, Results]) -> Results:
    """The means over the seeds at each rate, in the order of `STEPS`."""
    points = [Point(rate, name) for rate in dict.fromkeys(rate for _, rate in found) for name in STEPS]
    return {point: _mean([some[point] for some in found.values() if point in some]) for point in points}


def claims(results: Results) -> Iterator[Claim]:
    """Each step is better than the one before in mean or p99 E2E, and our conditions are better than the published.

    Without one of its parts, the sum of `plait` is at most 3 % faster.
    """
    for step in STEPS.values():
        if step.before is not None:
            yield _better(results, step.name, step.before, excused=_did(results, step, step.before))
    for ours, published in OURS.items():
        yield _better(results, ours, published)
    for step in TERM_STEPS[1:]:
        value = gain(results, SHIPPED, step.name, "e2e_s")
        yield Claim(f"{SHIPPED}: E2E over {step.name}", value, least=1 / WITHIN, where="mean")


def _better(results: Results, step: str, before: str, excused: str = "") -> Claim:
    gains = {word: gain(results, step, before, field) for word, field in E2E_FIELDS.items()}
    best = max(gains, key=gains.__getitem__)
    return Claim(f"{step}: E2E over {before}", gains[best], least=SAME, where=best, excused=excused)


E2E_FIELDS: Final = {"mean": "e2e_s", "p99": "e2e_p99_s"}


def gain(results: Results, step: str, before: str, field: str) -> float:
    """How many times shorter a time is than before; the geometric mean over the rates."""
    rates = {point.rate for point in results}
    ratios = [getattr(results[Point(r, before)], field) / getattr(results[Point(r, step)], field) for r in rates]
    return math.exp(fmean(map(math.log, ratios)))


def _did(results: Results, step: Step, before: str) -> str:
    now = [figures for point, figures in results.items() if point.step == step.name]
    then = [figures for point, figures in results.items() if point.step == before]

    def change(field: str) -> str:
        values = (fmean(getattr(figures, field) for figures in side) for side in (then, now))
        return " to ".join(f"{100 * value:.1f} %" for value in values)

    placed = f"it placed {100 * fmean(figures.added_share for figures in now):.2f} % of the calls; " * bool(
        step.reasons
    )
    shares = f"hit rate {change('hit_rate')}, calls on the busiest engine {change('busiest_share')}"
    return f"Measured: {placed}{shares}, decoding in the load as E2 counts it {change('decode_share')}."


def markdown(results: Results) -> Iterator[str]:
    """A row for each system: mean / p99 of E2E in seconds at each rate."""
    rates = list(dict.fromkeys(point.rate for point in results))
    yield "| mean / p99 E2E in s at rate | " + " | ".join(f"{rate:g}" for rate in rates) + " |"
    yield "|---|" + "---|" * len(rates)
    for name in STEPS:
        row = [results[Point(rate, name)] for rate in rates]
        yield f"| {name} | " + " | ".join(f"{one.e2e_s:.2f} / {one.e2e_p99_s:.2f}" for one in row) + " |"


def _figures(experiment: Comparison, workload: Workload, step: Step, rate_per_s: float) -> Figures:
    scheduled = replace(experiment, scheduler=step.scheduler)
    policy = step.new_policy(TREE_BLOCK_TOKENS)
    records = simulate(scheduled, workload, policy, rate_per_s, _quiet)[round(WARM_UP_SHARE * experiment.calls) :]
    outcome = summarise(step.name, records)
    return Figures(
        ttft_s=outcome.ttft_mean_s,
        ttft_p99_s=outcome.ttft_p99_s,
        e2e_s=outcome.e2e_mean_s,
        e2e_p99_s=outcome.e2e_p99_s,
        hit_rate=outcome.hit_rate,
        added_share=sum(outcome.reasons.get(reason, 0) for reason in step.reasons) / outcome.calls,
        busiest_share=max(outcome.calls_per_engine.values()) / outcome.calls,
        decode_share=_decode_share(records, load_profile(experiment.profile).cost_model()),
    )


def _decode_share(records: Sequence[CallRecord], costs: CostModel) -> float:
    prefill_s = sum(costs.prefill_time_s(record.computed_tokens, record.cached_tokens) for record in records)
    decode_s = sum(costs.decode_time_s(record.output_tokens, record.prompt_tokens) for record in records)
    return decode_s / (prefill_s + decode_s)


def _mean(runs: Sequence[Figures]) -> Figures:
    rows = [asdict(one) for one in runs]
    return Figures(**{name: fmean(row[name] for row in rows) for name in rows[0]})


def _report(inputs: Comparison, found: Mapping[Task, Results]) -> Report:
    results = means(found)
    return Report(
        lines=list(markdown(results)),
        claims=list(claims(results)),
        results=[{**asdict(point), **asdict(figures)} for point, figures in results.items()],
        inputs={
            **asdict(inputs),
            "seeds": list(dict.fromkeys(seed for seed, _ in found)),
            "policies": list(STEPS),
            "warm_up_share": WARM_UP_SHARE,
        },
    )


def _quiet(_label: str, _done: int, _total: int) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
