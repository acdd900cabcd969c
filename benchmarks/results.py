"""Writes docs/results.md from stored reports: `python -m benchmarks results [--run] [--run-long]`.

`--run` first runs what takes minutes, stores its reports, and writes README's tables, too. `--run-long` runs what takes
hours; it goes on from the tasks that an earlier run has left. In virtual time the same code writes the same bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Final

from benchmarks.placing.policy_intervals import INTERVALS, Interval
from benchmarks.placing.policy_report import Cell
from benchmarks.reporting.papers import PAPERS
from benchmarks.reporting.stored import FOLDER, Stored
from benchmarks.running.report import table
from plait.lab.commands.demo import QUICK_CALLS, TURNS, compared
from plait.lab.simulation.compare import Experiment

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "results.md"
README: Final = ROOT / "README.md"
README_TABLE: Final = "| | plait |"
"""How README's table of policies begins."""
README_GAINS: Final = "| what | "
"""How its table of gains begins."""

RUNS: Final[Mapping[str, list[str]]] = {
    "mission": ["--quick"],
    "preble": [],
    "ablation": ["--calls", "1500", "--seeds", "1", "2"],
}
"""Benchmarks of `--run` with their options: some half an hour on two cores."""
RUNS_LONG: Final[Mapping[str, list[str]]] = {"applications": [], "local_scheduler": [], "policies": [], "held": []}
LEFT: Final = ROOT / ".cache" / "results"
"""Finished tasks of long runs."""

TIER_COLUMNS: Final = (
    "workload", "mean without, s", "over that", "gateway without tiers, or gate alone", "predicted", "in each tier"
)  # fmt: skip
PAPER_COLUMNS: Final = ("figure", "factor", "paper", "here", "over the strongest rival", "", "why")


def main() -> int:
    """Write the page; returns 1 if a run has left no report. A claim that fails is in a report, and no error here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help=f"run {', '.join(RUNS)} before")
    parser.add_argument("--run-long", action="store_true", help=f"run {', '.join(RUNS_LONG)} before")
    arguments = parser.parse_args()
    runs = {**(RUNS if arguments.run else {}), **(RUNS_LONG if arguments.run_long else {})}
    is_whole = True
    for name, options in runs.items():
        is_whole &= _run(name, [*options, "--results", str(LEFT / name)])
    PAGE.write_text(page(Stored.read()), encoding="utf-8")
    if arguments.run:
        text = with_table(README.read_text(encoding="utf-8"), comparison())
        README.write_text(with_table(text, gains(Stored.read()), README_GAINS), encoding="utf-8")
    return int(not is_whole)


def _run(name: str, options: list[str]) -> bool:
    """Run a benchmark and store its report. Whether it wrote one: claims may fail, but no run may."""
    LEFT.mkdir(parents=True, exist_ok=True)
    new = LEFT / f"{name}.json"
    new.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks", name, *options, "--json", str(new)]
    subprocess.run(command, check=False, cwd=ROOT)  # noqa: S603 - our own
    if not new.exists():
        print(f"{name} has written no report", file=sys.stderr)
        return False
    FOLDER.mkdir(parents=True, exist_ok=True)
    new.replace(FOLDER / new.name)
    (LEFT / name).unlink(missing_ok=True)
    return True


def page(stored: Stored) -> str:
    """The page."""
    return "\n".join(_lines(stored)) + "\n"


def _lines(stored: Stored) -> Iterator[str]:
    yield from (
        "# Results",
        "",
        "`make results` writes this page from stored reports ([below](#the-reports)), each of which names its command.",
        "Reports without a date are in virtual time: the real routers, admission and schedulers on embedded engines,",
        "whose iterations take what a real engine's take ([cost model](design/cost-model.md)). The same code gives the",
        "same figures.",
        "",
        "## What is claimed of the gateway as it ships",
        "",
    )
    yield from table(("row", "claim", "value", "wanted", ""), map(_claimed, stored.reports["mission"]["results"]))
    failing = list(_failing(stored))
    yield from (
        "",
        "## What does not hold",
        "",
        f"The {len(failing)} claims of [the reports](#the-reports) whose figures fall short. Most are of the papers,",
        "on other hardware or other data: their tables below say why, figure by figure.",
        "",
    )
    yield from table(("report", "claim", "value", "wanted", "measured"), failing)
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
    yield from table(("report", "command", "machine"), (_source(*one) for one in stored.reports.items()))


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


def _failing(stored: Stored) -> Iterator[list[str]]:
    for report, found in stored.reports.items():
        for claim in found["claims"]:
            if not claim["holds"]:
                _, *figures, _ = _claimed({"row": "", **claim})
                yield [
                    f"[{report}](results/{report}.json)",
                    *figures,
                    claim.get("excused", "").removeprefix("Measured: "),
                ]


def _source(name: str, report: Mapping[str, Any]) -> list[str]:
    where = f"{report['machine']}, {report['date']}" if "machine" in report else ""
    return [f"[{name}](results/{name}.json)", f"`{report['command']}`", where]


def gains(stored: Stored) -> str:
    """README's table of gains: what a fleet, agents' sessions and programs gain, with the weakest figure, too."""
    found = {(row["row"], row["name"]): row["value"] for row in stored.rows("mission")}
    chained = [
        value
        for (row, name), value in found.items()
        if row == "programs" and name.endswith((", latency / plait", ", throughput / plait"))
    ]
    shared = found["comparison", "mean E2E, least outstanding / plait"]
    beside = 1 / found["agents", "chat, A 1.9, chat beside"]
    return "\n".join(
        table(
            ("what", "how much faster", "compared with"),
            [
                ("clients that share prompts", f"{shared:.1f} times in mean E2E", "least outstanding calls"),
                (
                    "chat beside agents whose sessions exceed the KV caches",
                    f"{beside:.1f} times in mean TTFT",
                    "all sessions let through",
                ),
                (
                    "programs: chains, map-reduces, agents",
                    f"{min(chained):.1f} to {max(chained):.1f} times in mean latency",
                    "clients that chain the calls",
                ),
            ],
        )
    )


def comparison() -> str:
    """README's table of policies."""
    return compared(Experiment(calls=QUICK_CALLS, turns=TURNS), None).markdown()


def with_table(text: str, made: str, begins: str = README_TABLE) -> str:
    """The text with another table in the place of the one that `begins` so."""
    before, begin, rest = text.partition(begins)
    _, end, after = rest.partition("\n\n")
    if not (begin and end):
        raise ValueError("README has no table")
    return f"{before}{made}\n\n{after}"


if __name__ == "__main__":
    sys.exit(main())
