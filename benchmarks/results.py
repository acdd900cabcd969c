"""Writes docs/results.md, its plots, and docs/measurements/claims.md from reports: `python -m benchmarks results`.

The reports are those in docs/results. `--run` first runs what takes minutes, stores its reports, and writes README's
tables, too. `--run-long` runs what takes hours; it goes on from the tasks that an earlier run has left. `--run-timed`
measures this machine, and `--store` takes reports that were written by themselves. In virtual time the same code writes
the same bytes. At last, the figures that README and the pages of docs name are compared with the reports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.reporting import page
from benchmarks.reporting.claims_page import claims_page
from benchmarks.reporting.named import contradictions, pages
from benchmarks.reporting.plots import HELD, chat_ttft_s
from benchmarks.reporting.stored import FOLDER, Stored
from benchmarks.running.report import table, write
from plait.lab.commands.demo import QUICK_CALLS, TURNS, compared
from plait.lab.simulation.compare import Experiment

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
README: Final = ROOT / "README.md"
README_TABLE: Final = "| | plait |"
"""How README's table of policies begins."""
README_GAINS: Final = "| what | "
"""How its table of gains begins."""

RUNS: Final[Mapping[str, list[str]]] = {
    "mission": ["--quick"],
    "preble": [],
    "ablation": ["--calls", "1500", "--seeds", "1", "2"],
    "curves": [],
    "agent_sessions": ["--groups", "demand", "--seeds", "1"],
    "full_fleet": ["--promises", "ttft-0.3", "--engines", "1", "--callers", "one", "--seeds", "1", "2"],
}
"""Benchmarks of `--run` with their options: some hour on two cores."""
RUNS_LONG: Final[Mapping[str, list[str]]] = {
    "applications": [],
    "local_scheduler": [],
    "policies": [],
    "held": [],
    "tiers": [],
}
"""Those that take hours."""
RUNS_TIMED: Final[Mapping[str, list[str]]] = {"dataplane": ["--routers", "cache aware", "--only", "ACPOS"]}
"""Those that measure this machine, which has to do nothing else."""
LEFT: Final = ROOT / ".cache" / "results"
"""Finished tasks of long runs."""


def main() -> int:
    """Write the pages; returns 1 if a run has left no report, or a sentence contradicts one.

    A claim that fails is in a report, and no error here.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help=f"run {', '.join(RUNS)} before")
    parser.add_argument("--run-long", action="store_true", help=f"run {', '.join(RUNS_LONG)} before")
    parser.add_argument("--run-timed", action="store_true", help=f"run {', '.join(RUNS_TIMED)} before")
    parser.add_argument("--store", type=Path, nargs="+", default=[], metavar="FILE", help="reports to store before")
    arguments = parser.parse_args()
    runs = {**(RUNS if arguments.run else {}), **(RUNS_LONG if arguments.run_long else {})}
    is_whole = True
    for name, options in runs.items():
        is_whole &= _run(name, [*options, "--results", str(LEFT / name)])
    for name, options in (RUNS_TIMED if arguments.run_timed else {}).items():
        is_whole &= _run(name, options)
    for path in arguments.store:
        _store(path)
    stored = Stored.read()
    for path, text in written(stored).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if arguments.run:
        text = with_table(README.read_text(encoding="utf-8"), comparison())
        README.write_text(with_table(text, gains(stored), README_GAINS), encoding="utf-8")
    wrong = [
        f"{path.relative_to(ROOT)}: {one}"
        for path in pages(ROOT)
        for one in contradictions(path.read_text(encoding="utf-8"), stored)
    ]
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong) or not is_whole)


def written(stored: Stored) -> dict[Path, str]:
    """The pages and the plots, by their files."""
    texts = {DOCS / "results.md": page.page(stored), DOCS / "measurements" / "claims.md": claims_page(stored)}
    plots = {DOCS / page.IMAGES / name: text for name, text in page.plots(stored).items()}
    return {path: "\n".join(lines) + "\n" for path, lines in texts.items()} | plots


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
    _store(new)
    (LEFT / name).unlink(missing_ok=True)
    return True


def _store(new: Path) -> None:
    """Store a report under the name of its file, with today's date."""
    kept = FOLDER / new.name
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    write(kept, dated(json.loads(new.read_text(encoding="utf-8")), before, f"{datetime.now(UTC):%Y-%m-%d}"))


def dated(report: Mapping[str, Any], before: Mapping[str, Any], day: str) -> dict[str, Any]:
    """A report with the day on which it is `stored`, and since when each of its claims fails, also `before`."""
    failed = {(one["name"], one.get("where")): one["since"] for one in before.get("claims", ()) if "since" in one}
    claims = [
        claim if claim["holds"] else {**claim, "since": failed.get((claim["name"], claim.get("where")), day)}
        for claim in report["claims"]
    ]
    made = {**report, "stored": before.get("stored", day), "claims": claims}
    return made if made == before else {**made, "stored": day}


def gains(stored: Stored) -> str:
    """README's table of gains: what a fleet, agents' sessions and programs gain, with the weakest figure, too."""
    found = {(row["row"], row["name"]): row["value"] for row in stored.rows("mission")}
    chained = [
        value
        for (row, name), value in found.items()
        if row == "programs" and name.endswith((", latency / plait", ", throughput / plait"))
    ]
    shared = found["comparison", "mean E2E, least outstanding / plait"]
    chat = {system: chat_ttft_s(stored, system) for system in HELD}
    held, capped = (chat["without"] / chat[system] for system in ("held", "capped"))
    return "\n".join(
        table(
            ("what", "how much faster", "compared with"),
            [
                ("clients that share prompts", f"{shared:.1f} times in mean E2E", "least outstanding calls"),
                (
                    "chat beside agents whose sessions exceed the KV caches",
                    f"{held:.1f} times in mean TTFT",
                    f"all sessions let through (with a cap that knows contexts: {capped:.1f})",
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
