"""The report on promised times: what is wanted, and a table of what was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from statistics import fmean
from typing import Final

from benchmarks.filling.promises import CALLERS, NO_JCT, PROMISES, Plan, Point, Results, Task
from benchmarks.filling.systems import ADMISSION, FCFS, NONE
from benchmarks.running.report import Report, merged
from plait.lab.simulation.claim import Claim

LEAST_COMPLETED: Final = 0.955
"""The share of the calls a second that are completed without JCTs: .960 on engines that plan one iteration ahead."""

SIMPLE: Final = (NONE, FCFS)

COLUMNS: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {
    "kept": ("kept", "{:.3f}".format),
    "ttft_p50_s": ("short TTFT p50, s", "{:.2f}".format),
    "ttft_p99_s": ("p99", "{:.2f}".format),
    "long_ttft_p50_s": ("long TTFT p50, s", "{:.2f}".format),
    "completed_per_s": ("calls/s", "{:.2f}".format),
    "tokens_per_s": ("tokens/s", "{:.0f}".format),
    "refused": ("refused", "{:.1f}".format),
}
"""Means over the seeds."""


def claims(results: Results, *, excuses: bool = True) -> Iterator[Claim]:
    """What is wanted of admission: the mean share over the seeds at the worst load, and nearly all calls a second.

    Each share is given with those that are kept at the same load by the engines' priorities alone, without a line, and
    by engines that serve calls in the order of arrival. The line may take from the better of these what may be
    missing of the promise itself. With `excuses`, a share that neither of these keeps fails no run.
    """
    found = {point: kept for point, kept in results.items() if point.system == ADMISSION}
    for promise, callers in dict.fromkeys((point.promise, point.callers) for point in found):
        if promise == NO_JCT:
            continue
        cells = [cell for cell in _cells(found) if (cell.promise, cell.callers) == (promise, callers)]
        kept = {cell: _mean(found, cell, "kept") for cell in cells}
        worst = min(kept, key=kept.__getitem__)
        least = min(PROMISES[promise].least, CALLERS[callers].least)
        simple = {system: _mean(results, replace(worst, system=system), "kept") for system in _beside(results, worst)}
        beside = "".join(f"; {system}: {share:.3f}" for system, share in simple.items())
        name = f"{promise} kept, callers {callers}, at its worst (load {worst.load:g}{beside})"
        yield Claim(name, kept[worst], least=least, excused=_missing_without_line(simple, least) if excuses else "")
        if simple:
            name = f"{promise} kept, callers {callers}, over the better of {', '.join(simple)} there"
            yield _at_least(name, kept[worst] / max(simple.values()), least)
        for cell in cells:
            plain = replace(cell, promise=NO_JCT)
            if PROMISES[promise].slo.jct_s is not None and plain in _cells(found):
                value = _mean(found, cell, "completed_per_s") / _mean(found, plain, "completed_per_s")
                name = f"calls/s, {promise} / {NO_JCT}, callers {callers}, load {cell.load:g}"
                yield _at_least(name, value, LEAST_COMPLETED)


def _missing_without_line(simple: Mapping[str, float], least: float) -> str:
    """What the better system without a line keeps, if it is less than `least`."""
    most = max(simple.values(), default=least)
    return f"Measured: without a line {most:.3f} are kept, so that what is missing is not the line's." * (most < least)


def markdown(results: Results) -> Iterator[str]:
    """A table for each promise and its callers."""
    for promise, callers in dict.fromkeys((point.promise, point.callers) for point in results):
        yield f"### {promise}, callers {callers}\n"
        yield _row("load", "system", *(name for name, _ in COLUMNS.values()))
        yield _row(*["---"] * (2 + len(COLUMNS)))
        for cell in _cells(results):
            if (cell.promise, cell.callers) == (promise, callers):
                figures = (show(_mean(results, cell, field)) for field, (_, show) in COLUMNS.items())
                yield _row(f"{cell.load:g}", cell.system, *figures)
        yield ""


def report(plan: Plan, found: Mapping[Task, Results]) -> Report:
    """The report on all promises."""
    results = merged(found)
    return Report(
        lines=list(markdown(results)),
        claims=list(claims(results)),
        results=[{**asdict(point), **asdict(kept)} for point, kept in results.items()],
        inputs=asdict(plan),
    )


def _beside(results: Results, cell: Point) -> list[str]:
    """The simple systems that were run at the same load."""
    cells = _cells(results)
    return [system for system in SIMPLE if replace(cell, system=system) in cells]


def _cells(points: Iterable[Point]) -> list[Point]:
    """One point for all seeds of each, in the order of the runs."""
    return list(dict.fromkeys(replace(point, seed=0) for point in points))


def _mean(results: Results, cell: Point, field: str) -> float:
    return fmean(getattr(kept, field) for point, kept in results.items() if replace(point, seed=0) == cell)


def _at_least(name: str, value: float, least: float) -> Claim:
    return Claim(name, value, least=least)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
