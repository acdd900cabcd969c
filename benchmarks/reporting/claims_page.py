"""docs/measurements/claims.md: every claim, placement by cell, KV tiers, the papers' figures, and the reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean, geometric_mean
from typing import Any, Final

from benchmarks.placing.policy_intervals import INTERVALS, Interval
from benchmarks.placing.policy_report import Cell
from benchmarks.reporting.papers import PAPERS
from benchmarks.reporting.stored import Stored
from benchmarks.running.report import table

TIER_COLUMNS: Final = (
    "workload", "mean without, s", "over that", "gateway without tiers, or gate alone", "predicted", "in each tier"
)  # fmt: skip
PAPER_COLUMNS: Final = ("figure", "factor", "paper", "here", "over the strongest rival", "", "why")


def claims_page(stored: Stored) -> Iterator[str]:
    """The lines of the page."""
    yield from (
        "# Claims: measurements",
        "",
        "`make results` writes this page from [stored reports](#the-reports), each of which names its command;",
        "[Results](../results.md) has what users ask first, and what does not hold. Reports without a machine are in",
        "virtual time: the real routers, admission and schedulers on embedded engines with a real engine's iteration",
        "times ([cost model](../design/cost-model.md)). The same code gives the same figures.",
        "",
        "## What is claimed of the gateway as it ships",
        "",
    )
    yield from table(("row", "claim", "value", "wanted", ""), map(_claimed, stored.reports["mission"]["results"]))
    yield from _placement(stored)
    yield from (
        "",
        "## What a KV tier in host memory gains",
        "",
        "Engines with four times their KV in host memory, over the same engines without: the mean E2E of calls, of",
        "agents the time of a session. *Predicted* is the share of the calls whose cached tokens were predicted within",
        "a tree block, in sum and in each tier.",
        "",
    )
    yield from table(TIER_COLUMNS, _tiers(stored))
    for paper, figures in PAPERS.items():
        yield from ("", f"## {paper}", "")
        yield from table(PAPER_COLUMNS, (figure.row(stored) for figure in figures))
    yield from ("", "## The reports", "")
    yield from table(("report", "stored", "command", "machine"), (_source(*one) for one in stored.reports.items()))


def _tiers(stored: Stored) -> Iterator[list[str]]:
    for workload in dict.fromkeys(row["workload"] for row in stored.rows("tiers")):
        rows = list(stored.rows("tiers", workload=workload))
        other = "untold" if "untold" in rows[0] else "gate"
        over = [geometric_mean([row[one]["mean_s"] / row["none"]["mean_s"] for row in rows]) for one in ("host", other)]
        shares = [fmean(row["host"][share] for row in rows) for share in ("within", "in_each_tier")]
        without_s = fmean(row["none"]["mean_s"] for row in rows)
        yield [workload, f"{without_s:.1f}", *(f"{one:.2f}" for one in over), *(f"{share:.3f}" for share in shares)]


def _placement(stored: Stored) -> Iterator[str]:
    name = "{}, geometric mean of all"
    e2e, p99 = (
        f"{stored.claims('policies', name.format(figure))[0]['value']:.3f}" for figure, _, _ in INTERVALS.values()
    )
    yield from (
        "",
        "## Placement over the best other policy",
        "",
        "`plait` over the policy with the least mean of each figure, of ten others: the geometric mean over the seeds,",
        "and its 95 % interval. Loads are calls a second, or a share of round robin's or the best policy's saturation.",
        f"In the geometric mean of all cells the mean E2E is {e2e}, and the p99 TTFT {p99}.",
        "",
    )
    yield from table(("fleet and load", *(name for name, _, _ in INTERVALS.values()), "seeds"), _placements(stored))


def _placements(stored: Stored) -> Iterator[list[str]]:
    for row in stored.rows("policies"):
        over = [str(Interval(**row["over_best"][figure])) for figure in INTERVALS if row["over_best"]]
        if over:
            cell = Cell(row["workload"], row["engines"], row["load"], row["fleet"])
            yield [str(cell), *over, f"{len(row['seeds'])}"]


def _claimed(row: Mapping[str, Any]) -> list[str]:
    name = f"{row['name']} ({row['where']})" if row.get("where") else row["name"]
    value = "none" if row["value"] is None else f"{row['value']:.3f}"
    return [row["row"], name, value, row["wanted"], "holds" if row["holds"] else "**fails**"]


def _source(name: str, report: Mapping[str, Any]) -> list[str]:
    where = f"{report['machine']}, {report['date']}" if "machine" in report else ""
    return [f"[{name}](../results/{name}.json)", report["stored"], f"`{report['command']}`", where]
