"""What is claimed of the gateway as it ships, in virtual time: `python -m benchmarks mission [--quick] [--only ROW]`.

Promised times, heavy tenants, programs, shared prefixes, documents, agents, and several gateways. Each row is an
experiment of its own, against the strongest simple alternatives in the same run. A row whose trace is missing is
skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.claiming.rows import Row, rows
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from e2e.traces import ABSENT
from plait.gateway.simulation.claim import Claim

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
    """Run, print, write; returns 1 if a claim fails."""
    names = list(rows(quick=True))
    made = parser(__doc__, quick="few and short runs: some minutes on two cores")
    made.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help=f"of {', '.join(names)}")
    arguments = made.parse_args()
    asked = {name: row for name, row in rows(quick=arguments.quick).items() if name in arguments.only}
    there = {name: row for name, row in asked.items() if all((arguments.traces / one).exists() for one in row.files)}
    for name in asked.keys() - there.keys():
        print(f"skipped: {name}, {ABSENT}")
    tasks = [(name, task) for name, row in there.items() for task in row.tasks]
    return conduct("mission", Experiment(tasks, NewRunner(arguments.quick), partial(report, there)), arguments)


def report(chosen: Mapping[str, Row], found: Mapping[Task, Any]) -> Report:
    """The table: the claims of each row."""
    made = {name: list(row.claims({task: found[name, task] for task in row.tasks})) for name, row in chosen.items()}
    cells = (
        [name, _named(claim), f"{claim.value:.3f}", claim.wanted, "holds" if claim.holds else "**fails**"]
        for name, claims in made.items()
        for claim in claims
    )
    return Report(
        lines=list(table(["row", "claim", "value", "wanted", ""], cells)),
        claims=[claim for claims in made.values() for claim in claims],
        results=[{"row": name, **claim.json()} for name, claims in made.items() for claim in claims],
    )


def _named(claim: Claim) -> str:
    return f"{claim.name} ({claim.where})" if claim.where else claim.name


if __name__ == "__main__":
    sys.exit(main())
