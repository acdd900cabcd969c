"""The figures as PNG files: each system over each swept parameter, and where the time goes; needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.application.experiments import EXPERIMENTS
from benchmarks.application.report import PARTS
from benchmarks.application.sweep import Point, Results
from benchmarks.application.systems import OURS

SWEPT = {
    "output_tokens": "output tokens a call",
    "chunk_tokens": "tokens a chunk",
    "background_rate": "background calls/s",
    "applications": "applications",
    "files": "files",
    "map_reduce_rate": "map-reduce summaries/s",
    "shared_tokens": "tokens that maps share",
}
Group = tuple[str, str, str]
"""An experiment, a swept parameter, a kind of jobs."""


def plot(results: Results, folder: Path) -> list[Path]:
    """Write every figure into `folder`; returns the files."""
    import matplotlib as mpl  # noqa: PLC0415 - a report without plots does not need it

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[Group, list[Point]] = {}
    for point in results:
        if point.kind in EXPERIMENTS[point.case.experiment].kinds:
            groups.setdefault((point.case.experiment, point.case.parameter, point.kind), []).append(point)
    return [_draw(results, points, folder / f"{'-'.join(group)}.png") for group, points in groups.items()]


def _draw(results: Results, points: list[Point], path: Path) -> Path:
    """On the left the figure that is compared, on the right a bar for each system at each value."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    experiment = EXPERIMENTS[points[0].case.experiment]
    canvas, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    for system in dict.fromkeys(point.system for point in points):
        line = [(point.case.value, _value(results, point)) for point in points if point.system == system]
        left.plot(*zip(*line, strict=True), "o-", label=system, linewidth=2.5 if system == OURS else 1.2)
    left.set_xlabel(SWEPT[points[0].case.parameter])
    left.set_ylabel(_label(points[0]))
    left.set_ylim(bottom=0)
    left.legend(fontsize=7)
    left.grid(alpha=0.3)
    _stack(right, results, points)
    canvas.suptitle(f"{experiment.title}: {points[0].kind}")
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
    plt.close(canvas)
    return path


def _stack(axes: Any, results: Results, points: list[Point]) -> None:
    positions = list(_positions(points))
    bottoms = [0.0] * len(points)
    for part in PARTS:
        heights = [results[point].breakdown[part] for point in points]
        axes.bar(positions, heights, bottom=bottoms, label=part.removesuffix("_s"))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    labels = [f"{point.system} {point.case.value:g}" for point in points]
    axes.set_xticks(positions, labels, rotation=90, fontsize=6)
    axes.set_ylabel("seconds of a job's critical path")
    axes.legend(fontsize=7)


def _positions(points: list[Point]) -> Iterator[float]:
    """A bar each, with a gap between cases."""
    position = 0.0
    for before, point in zip([None, *points], points, strict=False):
        position += 1.0 if before is None or before.case == point.case else 2.0
        yield position


def _value(results: Results, point: Point) -> float:
    figures = results[point]
    if figures.sustained_per_s is not None:
        return figures.sustained_per_s
    normalised = point.kind in EXPERIMENTS[point.case.experiment].normalised
    return figures.normalised_s if normalised else figures.latency_s


def _label(point: Point) -> str:
    experiment = EXPERIMENTS[point.case.experiment]
    if experiment.sustained:
        return "sustained calls/s"
    return "mean latency an output token, s" if point.kind in experiment.normalised else "mean latency, s"
