"""The report on placement policies: tables, claims and plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.placing.policy_runs import AT_ONCE, BASE, BOUNDS, OURS, PLAIN, RATES_PER_S, Figures, Runs, Task
from plait.lab.simulation.claim import Claim

Results = Mapping[Task, Runs]

SHOWN: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {
    "ttft_s": ("TTFT, s", "{:.3f}".format),
    "ttft_p99_s": ("p99", "{:.2f}".format),
    "e2e_s": ("E2E, s", "{:.3f}".format),
    "e2e_p99_s": ("p99", "{:.2f}".format),
    "completed_per_s": ("calls/s", "{:.2f}".format),
    "hit_rate": ("hit rate", "{:.1%}".format),
    "largest_share": ("busiest", "{:.0%}".format),
    "refused": ("refused", "{:.0f}".format),
}
LIMITS: Final = {
    "e2e_s": ("mean E2E", 0.97, 1.10),
    "ttft_s": ("mean TTFT", 1.03, 1.25),
    "ttft_p99_s": ("p99 TTFT", 1.08, 1.5),
}
"""By figure: over the best other policy's, in the geometric mean of all cells and in the worst one."""
COMING: Final = ("video", "loogle")
COMING_E2E: Final = 1.03


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload on so many engines under a load. The `fleet` is one of `FLEETS`."""

    workload: str
    engines: int
    load: str
    fleet: str = PLAIN

    def __str__(self) -> str:
        fleet = self.fleet and f" ({self.fleet})"
        return f"{self.workload}, {self.engines} engines{fleet}, {self.load}"

    @property
    def place(self) -> tuple[str, int, str]:
        """The cell without its load."""
        return self.workload, self.engines, self.fleet

    @property
    def is_plain(self) -> bool:
        """Whether it is one of equal engines behind one gateway, at a share of the saturation."""
        return self.fleet == PLAIN and self.load not in _PER_S


_PER_S: Final = {f"{per_s:g}/s" for rates in RATES_PER_S.values() for per_s in rates}


Means = Mapping[Cell, Mapping[str, Mapping[str, float]]]
"""The means over the seeds: by cell, policy and figure."""


def means(results: Results) -> Means:
    """Of all runs."""
    gathered: dict[Cell, dict[str, list[Figures]]] = {}
    for task, runs in results.items():
        for load, by_policy in runs.items():
            cell = gathered.setdefault(Cell(task.workload, task.engines, load, task.fleet), {})
            for policy, figures in by_policy.items():
                cell.setdefault(policy, []).append(figures)
    return {
        cell: {
            policy: {name: fmean(getattr(figures, name) for figures in runs) for name in SHOWN}
            for policy, runs in by_policy.items()
        }
        for cell, by_policy in gathered.items()
    }


def markdown(found: Means) -> Iterator[str]:
    """A table for each cell, then one of ratios."""
    for cell, by_policy in found.items():
        yield f"### {cell}\n"
        yield _row("policy", *(name for name, _ in SHOWN.values()))
        yield _row(*["---"] * (1 + len(SHOWN)))
        for policy, figures in by_policy.items():
            yield _row(f"`{policy}`", *(show(figures[name]) for name, (_, show) in SHOWN.items()))
        yield ""
    yield f"### `{OURS}` over the best other of each figure\n"
    yield _row("cell", *(name for name, _, _ in LIMITS.values()))
    yield _row(*["---"] * (1 + len(LIMITS)))
    for cell in found:
        if cell.load != AT_ONCE:
            yield _row(str(cell), *(f"{ratio(found, cell, name):.3f}" for name in LIMITS))
    yield ""


def ratio(found: Means, cell: Cell, figure: str) -> float:
    """Ours over the least of all others."""
    by_policy = found[cell]
    others = (figures[figure] for name, figures in by_policy.items() if name not in (OURS, *BOUNDS))
    return by_policy[OURS][figure] / min(others)


def claims(found: Means) -> Iterator[Claim]:
    """What is claimed of our policy, in plain cells."""
    found = {cell: by_policy for cell, by_policy in found.items() if cell.is_plain}
    steady = [cell for cell in found if cell.load != AT_ONCE]
    for figure, (name, mean_most, worst_most) in LIMITS.items():
        ratios = {cell: ratio(found, cell, figure) for cell in steady}
        mean = math.exp(fmean(map(math.log, ratios.values())))
        yield _at_most(f"{name}, geometric mean of {len(steady)} cells", mean, mean_most)
        worst = max(ratios, key=ratios.__getitem__)
        yield _at_most(f"{name}, worst ({worst})", ratios[worst], worst_most)
    for cell in steady:
        if cell.workload in COMING:
            yield _at_most(f"mean E2E, {cell}", ratio(found, cell, "e2e_s"), COMING_E2E)
    for cell, by_policy in found.items():
        if cell.load == AT_ONCE and BASE in by_policy:
            gain = by_policy[OURS]["completed_per_s"] / by_policy[BASE]["completed_per_s"]
            yield Claim(f"calls/s over {BASE}'s, {cell}", gain, least=1)


def plot(found: Means, folder: Path) -> Sequence[Path]:
    """A bar chart of each figure in `LIMITS`: all policies over the best one, in the geometric mean over the cells."""
    import matplotlib as mpl  # noqa: PLC0415 - a report without plots does not need it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    everywhere = set.intersection(*(set(by_policy) for by_policy in found.values()))
    steady = [cell for cell in found if cell.load != AT_ONCE]
    paths = []
    for figure, (name, _, _) in LIMITS.items():
        policies = [policy for policy in found[steady[0]] if policy in everywhere]
        values = [
            math.exp(fmean(math.log(found[cell][policy][figure] / _least(found, cell, figure)) for cell in steady))
            for policy in policies
        ]
        drawing, axes = plt.subplots(figsize=(8, 4))
        axes.barh(policies, values)
        axes.set_xscale("log")
        axes.set_xlabel(f"{name} over the best policy's, geometric mean of {len(steady)} cells")
        drawing.tight_layout()
        paths.append(folder / f"{figure}.png")
        drawing.savefig(paths[-1])
        plt.close(drawing)
    return paths


def _least(found: Means, cell: Cell, figure: str) -> float:
    return min(figures[figure] for figures in found[cell].values())


def _at_most(name: str, value: float, most: float) -> Claim:
    return Claim(name, value, most=most)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
