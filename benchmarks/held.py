"""Placement in the cells where it is held against others, over each rival, seed by seed: `python -m benchmarks held`.

`python -m benchmarks placement --held` is the same. In virtual time, with the real router, admission and engine cores,
which plan one iteration ahead. A ratio is the geometric mean over the seeds, of two runs with the same seed each; the
least and the largest of them are in brackets. What is tuned is tuned on other seeds (`--seeds`) than those reported.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Final

from benchmarks.mixed_prompts import LONG_FILE
from benchmarks.placing.held_cells import CELLS, MOVES, NAMED, NO_MOVES, RIVALS, SMG, SMG_MOVES, Runner, Task
from benchmarks.placing.policy_runs import OURS, Figures
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.gateway.config.placement_policy import placement_policy
from plait.lab.simulation.claim import Claim

SEEDS: Final = tuple(range(200, 208))
QUICK: Final = ("tools 10", "games 12")
FIGURES: Final = {"e2e_s": "mean E2E", "ttft_s": "mean TTFT", "ttft_p99_s": "p99 TTFT"}
WANTED: Final[Sequence[tuple[str, str, str, float]]] = (
    ("documents 8", "lmetric", "e2e_s", 1.03),
    ("documents 64", "lmetric", "e2e_s", 1.06),
    *((cell, SMG, "e2e_s", 1.05) for cell in ("games 12", "games 20")),
    *((cell, SMG, figure, most) for cell in ("loogle 2.7", "loogle 3") for figure, most in
      (("e2e_s", 1.10), ("ttft_p99_s", 1.0))),
)  # fmt: skip
"""(cell, rival, figure, what the ratio is at most)"""
WANTED_OVER_BEST: Final = {"e2e_s": 1.0, "ttft_p99_s": 1.16}
MOVES_MOST: Final = 1.05
"""Mean E2E with moves over that without, in any cell."""

Results = Mapping[Task, Figures]
BySeed = Mapping[int, Figures]
Found = Mapping[str, Mapping[str, BySeed]]
"""Figures by cell, policy and seed."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of a policy over that of another, of runs with the same seeds."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, these: BySeed, those: BySeed, figure: str) -> Ratio:
        """The geometric mean over the seeds, and the ends."""
        ratios = [getattr(one, figure) / getattr(those[seed], figure) for seed, one in these.items()]
        return cls(geometric(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.least:.2f}-{self.most:.2f})"


def geometric(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(fmean(map(math.log, values)))


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, quick=f"only {' and '.join(QUICK)}", seeds=SEEDS)
    made.add_argument("--only", nargs="+", choices=CELLS, default=[*CELLS], metavar="CELL",
                      help=f"of {', '.join(CELLS)}; default: all")  # fmt: skip
    made.add_argument(
        "--policies", nargs="+", type=_named, default=[*RIVALS, NO_MOVES, SMG_MOVES], metavar="POLICY",
        help=f"beside {OURS}, of {', '.join(NAMED)}, or package.module:name; default: %(default)s",
    )  # fmt: skip
    given = made.parse_args()
    tasks = list(_tasks(QUICK if given.quick else given.only, given.seeds, dict.fromkeys((OURS, *given.policies))))
    files = [LONG_FILE] if any(CELLS[task.cell].workload == "mooncake" for task in tasks) else []
    return conduct("held", Experiment(tasks, Runner, _report, files), given)


def _named(name: str) -> str:
    try:
        placement_policy(name, known=NAMED)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _tasks(cells: Sequence[str], seeds: Sequence[int], policies: Mapping[str, object]) -> Iterator[Task]:
    """The first seed of all cells before the second. A cell has as many seeds as it needs."""
    for number, seed in enumerate(seeds):
        for cell in cells:
            if number < CELLS[cell].seeds:
                yield from (Task(cell, seed, policy) for policy in policies)


def _report(results: Results) -> Report:
    found: defaultdict[str, defaultdict[str, dict[int, Figures]]] = defaultdict(lambda: defaultdict(dict))
    for task, one in results.items():
        found[task.cell][task.policy][task.seed] = one
    return Report(
        lines=list(markdown(found)),
        claims=list(claims(found)),
        results=[{**asdict(task), **asdict(one)} for task, one in results.items()],
        inputs={"cells": {name: asdict(CELLS[name]) for name in found}},
    )


def markdown(found: Found) -> Iterator[str]:
    """What each run came to, ours over each other policy, and over the best rivals of each cell."""
    yield from table(["cell", "policy", *(f"{name}, s" for name in FIGURES.values()), "hits", "busiest"], _means(found))
    yield ""
    over = f"{OURS} over"
    yield from table(["cell", "seeds", over, *FIGURES.values()], _ratios(found))
    if over_best(found, "e2e_s"):
        columns = (f"{name} over the best of {len(RIVALS)}" for name in FIGURES.values())
        yield from ("", *table(["cell", *columns], _bests(found)))


def _means(found: Found) -> Iterator[list[str]]:
    for cell, by_policy in found.items():
        for policy, by_seed in by_policy.items():
            mean = partial(_mean, list(by_seed.values()))
            times = [f"{mean(figure):.3f}" for figure in FIGURES]
            yield [cell, policy, *times, f"{mean('hit_rate'):.1%}", f"{mean('largest_share'):.1%}"]


def _mean(runs: Sequence[Figures], figure: str) -> float:
    return fmean(getattr(one, figure) for one in runs)


def _ratios(found: Found) -> Iterator[list[str]]:
    for cell, by_policy in found.items():
        for over, under in _pairs(by_policy):
            ratios = [str(Ratio.of(by_policy[over], by_policy[under], figure)) for figure in FIGURES]
            yield [cell, f"{len(by_policy[over])}", under if over == OURS else f"({over}) {under}", *ratios]


def _pairs(policies: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Ours over each other policy; a rival's choice with moves over that without."""
    for name in policies:
        if name == SMG_MOVES and SMG in policies:
            yield name, SMG
        elif name not in (OURS, SMG_MOVES):
            yield OURS, name


def _bests(found: Found) -> Iterator[list[str]]:
    over = {figure: over_best(found, figure) for figure in FIGURES}
    for cell in over["e2e_s"]:
        yield [cell, *(f"{by_cell[cell][1]} {by_cell[cell][0]}" for by_cell in over.values())]
    means = (geometric([ratio.mean for _, ratio in by_cell.values()]) for by_cell in over.values())
    yield ["geometric mean", *(f"{mean:.3f}" for mean in means)]


def over_best(found: Found, figure: str) -> dict[str, tuple[str, Ratio]]:
    """By cell: the rival with the least geometric mean over the seeds, and ours over that one."""
    best = {}
    for cell, by_policy in found.items():
        over = {name: Ratio.of(by_policy[OURS], by_policy[name], figure) for name in RIVALS if name in by_policy}
        if over:
            best[cell] = max(over.items(), key=lambda one: one[1].mean)
    return best


def claims(found: Found) -> Iterator[Claim]:
    """What is wanted of the cells and policies that were run. In the mean of some cells, nothing is."""
    for cell, rival, figure, most in WANTED:
        if rival in found.get(cell, {}):
            ratio = Ratio.of(found[cell][OURS], found[cell][rival], figure)
            yield Claim(f"{FIGURES[figure]}, {cell}, {OURS} / {rival}", ratio.mean, most=most)
    if found.keys() == CELLS.keys() and all(by_policy.keys() >= set(RIVALS) for by_policy in found.values()):
        for figure, most in WANTED_OVER_BEST.items():
            over = geometric([ratio.mean for _, ratio in over_best(found, figure).values()])
            yield Claim(f"{FIGURES[figure]} over the best rival's, all cells", over, most=most)
    for moving, waiting in MOVES:
        for cell, by_policy in found.items():
            if moving in by_policy and waiting in by_policy:
                ratio = Ratio.of(by_policy[moving], by_policy[waiting], "e2e_s")
                yield Claim(f"mean E2E, {cell}, {moving} / {waiting}", ratio.mean, most=MOVES_MOST)


if __name__ == "__main__":
    sys.exit(main())
