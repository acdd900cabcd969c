"""Our policy over the best other one in each cell, seed by seed: the geometric mean and its confidence interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

from benchmarks.placing.policy_report import Cell, Results
from benchmarks.placing.policy_runs import AT_ONCE, BOUNDS, OURS, Figures
from plait.lab.simulation.claim import Claim

INTERVALS: Final[Mapping[str, tuple[str, float, float | None]]] = {
    "e2e_s": ("mean E2E", 0.96, 1.05),
    "ttft_p99_s": ("p99 TTFT", 1.06, None),
}
"""By figure: what the geometric mean of all cells is at most, and what is within the interval of each cell."""

MOST: Final = {("video", ""): 1.10, ("loogle", "3/s"): 1.15}
"""By workload and load (empty: any): what is within the interval of mean E2E instead."""

STUDENT_95: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Quantiles of Student's t for a two-sided interval of 95 %, from one degree of freedom on."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio, its 95 % interval over the seeds, and the policy that it is over. One seed gives no interval."""

    ratio: float
    low: float
    high: float
    best: str

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}) `{self.best}`"


def intervals(results: Results, figure: str) -> dict[Cell, Interval]:
    """For each cell but those where all calls come at once. The best other is that with the least mean."""
    by_cell: defaultdict[Cell, list[Mapping[str, Figures]]] = defaultdict(list)
    for task, runs in results.items():
        for load, by_policy in runs.items():
            if load != AT_ONCE:
                by_cell[Cell(task.workload, task.engines, load, task.fleet)].append(by_policy)
    return {cell: _interval(seeds, figure) for cell, seeds in by_cell.items()}


def _interval(seeds: list[Mapping[str, Figures]], figure: str) -> Interval:
    means = {name: fmean(getattr(by[name], figure) for by in seeds) for name in seeds[0] if name not in (OURS, *BOUNDS)}
    best = min(means, key=means.__getitem__)
    logs = [math.log(getattr(by[OURS], figure) / getattr(by[best], figure)) for by in seeds]
    mean, half = fmean(logs), 0.0
    if len(logs) > 1:
        half = STUDENT_95[min(len(logs) - 2, len(STUDENT_95) - 1)] * stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), best)


def interval_table(by_figure: Mapping[str, Mapping[Cell, Interval]]) -> Iterator[str]:
    """A row for each cell."""
    yield f"### `{OURS}` over the best other, with the 95 % interval over the seeds\n"
    yield f"| cell | {' | '.join(INTERVALS[figure][0] for figure in by_figure)} |"
    yield f"| --- |{' --- |' * len(by_figure)}"
    for cell in next(iter(by_figure.values())):
        yield f"| {cell} | {' | '.join(str(found[cell]) for found in by_figure.values())} |"
    yield ""


def interval_claims(by_figure: Mapping[str, Mapping[Cell, Interval]]) -> Iterator[Claim]:
    """Of the geometric means, and of the lower end in the worst cell."""
    for figure, found in by_figure.items():
        name, most, within = INTERVALS[figure]
        mean = math.exp(fmean(math.log(one.ratio) for one in found.values()))
        yield Claim(f"{name}, geometric mean of all {len(found)} cells", mean, most=most)
        if within is not None:
            over = {cell: one.low / MOST.get((cell.workload, cell.load), MOST.get((cell.workload, ""), within))
                    for cell, one in found.items()}  # fmt: skip
            worst = max(over, key=over.__getitem__)
            value = within * over[worst]
            yield Claim(f"{name}, lower end, worst ({worst})", value, most=within)
