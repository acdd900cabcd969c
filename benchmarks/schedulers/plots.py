"""The figures as PNG files; needs matplotlib, which only the benchmarks use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.schedulers.sweep import BOUND, Point, Results
from benchmarks.schedulers.systems import systems

STYLES = {
    "baseline": ":",
    "ours": "-",
    "ablation": "-.",
    "variant": "-.",
    "clairvoyant": "--",
    "registered": ":",
    BOUND: "k--",
}

FIELDS = {
    "throughput": ("throughput_calls_s", "calls/s completed"),
    "goodput": ("goodput_calls_s", "calls/s that met all objectives"),
    "call_attainment": ("feasible_attainment", "share of feasible calls that met all objectives"),
    "iteration_attainment": ("iteration_attainment", "share of iterations within their SLO"),
    "jct": ("jct_mean_s", "mean job completion time, s"),
    "decision": ("decision_median_ms", "median CPU time of a decision, ms"),
    "compute": ("compute_utilisation", "forward size over the pivot forward size"),
    "kv": ("kv_utilisation", "KV cache in use while busy"),
}
LOGARITHMIC = {"jct", "decision"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot: `metric` of every system over the arrival rate, or over the share of long prompts."""

    name: str
    metric: str
    points: frozenset[Point]
    over_share: bool = False


def figures(results: Results) -> Iterator[Figure]:
    """The figures that the results have points for."""
    by_rate = [point for point in results if point.figure == "rate"]
    for tpot in sorted({point.tpot for point in by_rate}):
        of_kind = frozenset(point for point in by_rate if point.tpot == tpot)
        for metric in FIELDS:
            yield Figure(f"{metric}-{tpot}", metric, of_kind)
    alone = [point for point in results if point.figure == "alone"]
    for share in sorted({point.long_share for point in alone}):
        yield Figure(f"goodput-alone-{share:g}", "goodput", frozenset(p for p in alone if p.long_share == share))
    by_share = frozenset(point for point in results if point.figure == "share")
    if by_share:
        yield Figure("goodput-long-share", "goodput", by_share, over_share=True)


def plot(results: Results, folder: Path) -> list[Path]:
    """Write every figure into `folder`; returns the files."""
    import matplotlib as mpl  # noqa: PLC0415 - a report without plots does not need it

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(results, figure, folder / f"{figure.name}.png") for figure in figures(results)]


def _draw(results: Results, figure: Figure, path: Path) -> Path:
    import matplotlib.pyplot as plt  # noqa: PLC0415

    field, label = FIELDS[figure.metric]
    kinds = {**{name: system.kind for name, system in systems().items()}, BOUND: BOUND}
    canvas, axes = plt.subplots(figsize=(8, 5))
    for name in dict.fromkeys(point.system for point in results):
        line = sorted(
            (point.long_share if figure.over_share else point.rate_per_s, results[point][field])
            for point in figure.points
            if point.system == name and field in results[point]
        )
        if line:
            width = 2.5 if kinds[name] == "ours" else 1.2
            axes.plot([x for x, _ in line], [y for _, y in line], STYLES[kinds[name]], label=name, linewidth=width)
    axes.set_xlabel("share of long prompts" if figure.over_share else "offered calls/s")
    axes.set_ylabel(label)
    axes.set_yscale("log" if figure.metric in LOGARITHMIC else "linear")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
    plt.close(canvas)
    return path
