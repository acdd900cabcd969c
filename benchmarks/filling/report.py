"""The report: a table for each workload and one over all of them, and the rows of JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any, Final

from benchmarks.filling.claims import Place, geometric_mean, hit_rate_loss, load_name, places, ratio, seeds
from benchmarks.filling.runs import AT_ONCE, Figures, Point, Results

COLUMNS: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {
    "ttft_mean_s": ("TTFT mean, s", "{:.2f}".format),
    "ttft_p99_s": ("p99", "{:.2f}".format),
    "ttft_longest_s": ("longest", "{:.1f}".format),
    "e2e_mean_s": ("E2E mean, s", "{:.2f}".format),
    "hit_rate": ("hit rate", "{:.1%}".format),
    "completed_per_s": ("calls/s", "{:.2f}".format),
    "refused_calls": ("refused", "{:.0f}".format),
}
"""Means over the seeds."""
RATIOS: Final = {"ttft_mean_s": "TTFT", "e2e_mean_s": "E2E", "completed_per_s": "calls/s"}
"""Over those of the system `none`; geometric means over the seeds."""


def markdown(results: Results) -> Iterator[str]:
    """All tables. A ratio is that of a system to `none`."""
    for workload in dict.fromkeys(point.workload for point in results):
        yield f"### {workload}, saturation {_saturation_per_s(results, workload):.2f} calls/s\n"
        yield from _head(["load", "system", *(name for name, _ in COLUMNS.values()), *_times()])
        for place in sorted(places(results), key=lambda place: place.load):
            if place.workload == workload:
                yield from (_row(results, place, system) for system in _systems(results))
        yield ""
    yield "### all workloads, geometric means\n"
    yield from _head(["load", "system", *_times(), "hit rate lost"])
    for load in sorted({point.load for point in results}):
        yield from (_mean_row(results, load, system) for system in _systems(results))


def rows(results: Results) -> list[dict[str, Any]]:
    """The figures of every run, for JSON."""
    return [{**asdict(point), **asdict(figures)} for point, figures in results.items()]


def _systems(results: Results) -> list[str]:
    return list(dict.fromkeys(point.system for point in results))


def _saturation_per_s(results: Results, workload: str) -> float:
    """The best system's, all calls at once; the mean over the seeds."""
    by_seed: dict[int, float] = {}
    for point, figures in results.items():
        if (point.workload, point.load) == (workload, AT_ONCE):
            by_seed[point.seed] = max(by_seed.get(point.seed, 0.0), figures.completed_per_s)
    return fmean(by_seed.values())


def _row(results: Results, place: Place, system: str) -> str:
    runs = [results[Point(place.workload, place.load, system, seed)] for seed in seeds(results, place)]
    cells = [show(_mean(runs, field)) for field, (_, show) in COLUMNS.items()]
    times = [f"{ratio(results, place, system, field):.3f}" for field in RATIOS]
    return _line([load_name(place.load), system, *cells, *times])


def _mean_row(results: Results, load: float, system: str) -> str:
    at_load = [place for place in places(results) if place.load == load]
    times = [geometric_mean([ratio(results, place, system, field) for place in at_load]) for field in RATIOS]
    lost = fmean(hit_rate_loss(results, place, system) for place in at_load)
    return _line([load_name(load), system, *(f"{value:.3f}" for value in times), f"{100 * lost:.1f} points"])


def _mean(runs: list[Figures], field: str) -> float:
    return fmean(getattr(figures, field) for figures in runs)


def _times() -> list[str]:
    return [f"{name} / none" for name in RATIOS.values()]


def _head(names: list[str]) -> Iterator[str]:
    yield _line(names)
    yield "|" + "---|" * len(names)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
