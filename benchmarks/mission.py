"""What is claimed of the gateway as it ships, in virtual time: `python -m benchmarks mission [--quick] [--only ROW]`.

Promised times, heavy tenants, programs, shared prefixes, documents, agents, and several gateways. Each row is an
experiment of its own, against the strongest simple alternatives in the same run. A row whose trace is missing is
skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.claiming.rows import Row, rows
from benchmarks.schedulers.sweep import Progress
from benchmarks.workers import run_all
from e2e.traces import ABSENT, TRACES
from plait.gateway.simulation.compare import Claim

Task = tuple[str, Any]
"""A row's name, and a task of its runner."""


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Makes a runner in a worker process."""

    quick: bool

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        return Runner(rows(quick=self.quick), traces)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks of all rows. A row's own runner is made for its first task."""

    rows: Mapping[str, Row]
    traces: Path
    made: dict[str, Callable[[Any], Any]] = field(default_factory=dict)

    def __call__(self, task: Task) -> Any:
        """What the row's own runner returns."""
        name, own = task
        if name not in self.made:
            self.made[name] = self.rows[name].new_runner(self.traces)
        return self.made[name](own)


def main() -> int:
    """Run, print, write; returns 1 if a claim does not hold."""
    arguments = _arguments()
    chosen = {name: row for name, row in rows(quick=arguments.quick).items() if name in arguments.only}
    skipped = {name for name, row in chosen.items() if not all((arguments.traces / one).is_file() for one in row.files)}
    for name in skipped:
        print(f"skipped: {name}, {ABSENT}")
    made = run({name: row for name, row in chosen.items() if name not in skipped}, arguments)
    print("\n".join(markdown(made)))
    if arguments.json is not None:
        report = [{"row": name, **asdict(claim)} for name, claims in made.items() for claim in claims]
        arguments.json.write_text(json.dumps({"claims": report}, indent=1) + "\n", encoding="utf-8")
    return int(not all(claim.holds for claims in made.values() for claim in claims))


def run(chosen: Mapping[str, Row], arguments: argparse.Namespace) -> dict[str, list[Claim]]:
    """The claims of each row."""
    tasks = [(name, task) for name, row in chosen.items() for task in row.tasks]
    found: dict[Task, Any] = {}
    progress = Progress()
    for task, result in run_all(NewRunner(arguments.quick), arguments.traces, tasks, arguments.jobs):
        found[task] = result
        progress(len(found), len(tasks))
    return {name: list(row.claims({task: found[name, task] for task in row.tasks})) for name, row in chosen.items()}


def markdown(made: Mapping[str, Sequence[Claim]]) -> Iterator[str]:
    """The table."""
    yield "| row | claim | value | wanted | |"
    yield "|---|---|---|---|---|"
    for name, claims in made.items():
        for claim in claims:
            word = "holds" if claim.holds else "**fails**"
            yield f"| {name} | {claim.name} | {claim.value:.3f} | {claim.target} | {word} |"


def _arguments() -> argparse.Namespace:
    names = list(rows(quick=True))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and short runs: some minutes on two cores")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help=f"of {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the claims here")
    parser.add_argument("--traces", type=Path, default=TRACES, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
