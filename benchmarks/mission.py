"""What is claimed of the gateway as it ships, in virtual time: `python -m benchmarks mission [--quick] [--only ROW]`.

Promised times, heavy tenants, programs, shared prefixes, documents, agents, and several gateways. Each row is an
experiment of its own, against the strongest simple alternatives in the same run. A row whose trace is missing is
skipped. `--turn N`, as in `.ci/run`, leaves the rows of other turns to other runs. A claim is of three seeds or more,
and shows the least and the most that one of them gives. `--later N` takes seeds that are so much later, on which
nothing was tuned and no bound was set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.claiming.rows import Row, in_turn, rows, with_parts
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report
from e2e.traces import ABSENT

Task = tuple[str, Any]
"""A row's name, and a task of its runner."""


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Makes a runner in a worker process."""

    quick: bool

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        return Runner(with_parts(rows(quick=self.quick)), traces)


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
    made = parser(__doc__, quick="few and short runs: some minutes on two cores")
    made.add_argument("--later", type=int, default=0, metavar="N", help="add to each seed (default: %(default)s)")
    chosen = made.add_mutually_exclusive_group()
    chosen.add_argument("--turn", type=int, metavar="N", help="leave out the rows of other turns than this one")
    chosen.add_argument("--only", nargs="+", metavar="ROW", help=f"of {', '.join(with_parts(rows(quick=False)))}")
    arguments = made.parse_args()
    whole = rows(quick=arguments.quick, later=arguments.later)
    known = with_parts(whole)
    if unknown := set(arguments.only or ()) - known.keys():
        made.error(f"no rows of such names: {', '.join(sorted(unknown))}")
    names = arguments.only or (whole if arguments.turn is None else in_turn(whole, arguments.turn))
    asked = {name: known[name] for name in names}
    there = {name: row for name, row in asked.items() if all((arguments.traces / one).exists() for one in row.files)}
    for name in asked.keys() - there.keys():
        print(f"skipped: {name}, {ABSENT}")
    tasks = [(name, task) for name, row in there.items() for task in row.tasks]
    return conduct("mission", Experiment(tasks, NewRunner(arguments.quick), partial(report, there)), arguments)


def report(chosen: Mapping[str, Row], found: Mapping[Task, Any]) -> Report:
    """The claims of each row."""
    made = [
        (name, claim)
        for name, row in chosen.items()
        for claim in row.claims_by_seed({task: found[name, task] for task in row.tasks})
    ]
    return Report(
        lines=[],
        claims=[replace(claim, name=f"{name}: {claim.name}") for name, claim in made],
        results=[{"row": name, **claim.json()} for name, claim in made],
    )


if __name__ == "__main__":
    sys.exit(main())
