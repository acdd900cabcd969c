"""The report: tables with where the time goes and how many times better ours is, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.application.claims import speedup
from benchmarks.application.experiments import EXPERIMENTS, Case
from benchmarks.application.sweep import Point, Results
from benchmarks.application.systems import OURS

PARTS = ("network_s", "queue_s", "prefill_s", "decode_s")
TITLES = (
    "system", "jobs", "latency s", "p90 s", "s/token", "rate /s", "hit rate", "network s", "queue s", "prefill s",
    "decode s", "ms/token", "ours better",
)  # fmt: skip


def markdown(results: Results) -> Iterator[str]:
    """A table for each case and kind of jobs."""
    yield "# Applications"
    yield ""
    yield (
        "Seconds of a job are divided along its critical path: network (all time outside the engines), queue (in an "
        "engine, before it is computed), prefill (until the first token), decode (from then on). `s/token` is a job's "
        "latency an output token, `ms/token` the time between two tokens of a call, `ours better` how many times "
        "better ours is."
    )
    experiment = ""
    for case, kind in dict.fromkeys((point.case, point.kind) for point in results):
        if case.experiment != experiment:
            experiment = case.experiment
            yield from ("", f"## {EXPERIMENTS[experiment].title}")
        yield from ("", f"### {kind}: {case.parameter} {case.value:g}", "", *_table(results, case, kind))


def _table(results: Results, case: Case, kind: str) -> Iterator[str]:
    yield "|" + "".join(f" {title} |" for title in TITLES)
    yield "|---|" + "---:|" * (len(TITLES) - 1)
    for point in results:
        if (point.case, point.kind) == (case, kind):
            yield _row(results, point)


def _row(results: Results, point: Point) -> str:
    figures = results[point]
    rate = "" if figures.sustained_per_s is None else f"{figures.sustained_per_s:.2f}"
    better = "" if point.system == OURS else f"{speedup(results, _ours(point), point.system):.2f}"
    cells = [
        point.system,
        f"{figures.jobs}",
        f"{figures.latency_s:.2f}",
        f"{figures.latency_p90_s:.2f}",
        f"{figures.normalised_s:.4f}",
        rate,
        f"{figures.hit_rate:.2f}",
        *(f"{figures.breakdown[part]:.2f}" for part in PARTS),
        f"{figures.token_s * 1e3:.1f}",
        better,
    ]
    return "|" + "".join(f" {cell} |" for cell in cells)


def _ours(point: Point) -> Point:
    return Point(point.case, OURS, point.kind)
