"""An engine drains, comes new, or is faster than its profile says: `python -m benchmarks fleet_changes`.

In virtual time, with admission as it ships. A fleet whose engine drains is compared with one that never had it, a fleet
that gets an engine with one that does not, and a router that does not know how fast an engine is with one that does.
Rates are shares of what the engines that stay complete a second if all calls come at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import exp, inf, log
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.filling.systems import FleetSize, simulated
from benchmarks.filling.workloads import Workload, documents, tools
from benchmarks.placing.workloads import chat
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.config.sections import AdmissionConfig, PlacementConfig
from plait.gateway.fleet.router import Router
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.simulate import CallRecord, SimulatedCall

ENGINES: Final = 4
CHANGED: Final = "engine-0"
WORKLOADS: Final[dict[str, Workload]] = {"tools": tools, "documents": documents, "chat": chat}
RATES: Final = (0.5, 0.75)
AT_ONCE: Final = 400
"""So many calls come at once to find the rates."""
CHANGE_S: Final = 180.0
MINUTE_S: Final = 60.0
FASTER: Final = 2.0

DRAINED_MOST: Final = 1.15
"""Mean E2E in the minutes after a drain, over the fleet that never had the engine."""
NEW_MOST: Final = 1.05
"""Mean E2E in the minute after an engine came, over the fleet without it."""
NEW_SHARE: Final = 0.75
"""A new engine's part of an equal share of the calls, in its second minute."""
FASTER_MOST: Final = 1.08
"""Mean E2E with a faster engine that nobody told of, over a router that knows."""

Change = Callable[[Router, float], None]
Task = tuple[str, int]
"""A workload, and a seed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One change on one workload at one rate, with one seed. `share` is of the new engine."""

    change: str
    workload: str
    rate: float
    seed: int
    ratio: float
    share: float = 0.0


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, seeds=(11, 12, 13))
    made.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    arguments = made.parse_args()
    tasks = [(name, seed) for name in arguments.workloads for seed in arguments.seeds]
    return conduct("fleet_changes", Experiment(tasks, _new_runner, _report), arguments)


def _new_runner(_traces: Path) -> Callable[[Task], list[Row]]:
    return lambda task: list(_rows(*task))


def _report(by_task: Mapping[Task, Sequence[Row]]) -> Report:
    rows = [row for some in by_task.values() for row in some]
    cells = []
    for change, workload, rate in dict.fromkeys((row.change, row.workload, row.rate) for row in rows):
        found = [row for row in rows if (row.change, row.workload, row.rate) == (change, workload, rate)]
        share = fmean(row.share for row in found)
        cells.append([change, workload, rate, f"{_geometric(found):.3f}", f"{share:.0%}" if share else ""])
    return Report(
        lines=list(table(["change", "workload", "rate", "mean E2E, ratio", "share"], cells)),
        claims=list(_claims(rows)),
        results=[asdict(row) for row in rows],
    )


def _rows(name: str, seed: int) -> Iterator[Row]:
    workload = WORKLOADS[name]
    fewer, all_of_them = FleetSize(engines=ENGINES - 1), FleetSize(engines=ENGINES)
    at_once = _run(fewer, workload(AT_ONCE, inf, seed))
    completed_per_s = AT_ONCE / max(record.finished_s for record in at_once)
    for rate in RATES:
        per_s = rate * completed_per_s
        calls = workload(round(per_s * (CHANGE_S + 3 * MINUTE_S)), per_s, seed)
        row = partial(Row, workload=name, rate=rate, seed=seed)
        without = _run(fewer, calls)
        drains: dict[str, list[tuple[float, Change]]] = {
            "drained at once": [(CHANGE_S, _drain)],
            "drained ahead": [(CHANGE_S, _hand_over), (CHANGE_S + PlacementConfig().hand_over_s, _drain)],
        }
        for change, events in drains.items():
            drained = _run(all_of_them, calls, *events)
            for minute in (0, 1):
                ratio = _e2e_s(drained, minute, minute + 1) / _e2e_s(without, minute, minute + 1)
                yield row(f"{change}, minute {minute + 1}", ratio=ratio)
        grown = _run(all_of_them, calls, (0.0, _drain), (CHANGE_S, _come))
        late = [record for record in _between(grown, 1, 2) if record.engine_id == CHANGED]
        share = len(late) / len(_between(grown, 1, 2)) * ENGINES
        yield row("new engine", ratio=_e2e_s(grown, 0, 1) / _e2e_s(without, 0, 1), share=share)
        told, untold = (_run(FleetSize(engines=ENGINES, faster=FASTER, told=told), calls) for told in (True, False))
        yield row("faster engine", ratio=_e2e_s(untold, -2, 3) / _e2e_s(told, -2, 3))


def _hand_over(router: Router, now_s: float) -> None:
    router.hand_over.begin(router.engines[CHANGED].view, now_s)
    router.models.refresh()


def _drain(router: Router, _now_s: float) -> None:
    router.hand_over.end(CHANGED)
    router.health.drain(CHANGED)


def _come(router: Router, _now_s: float) -> None:
    router.health.drain(CHANGED, draining=False)


def _run(fleet: FleetSize, calls: Sequence[SimulatedCall], *changes: tuple[float, Change]) -> list[CallRecord]:
    router, simulation = simulated(fleet, "plait", AHEAD_S, AdmissionConfig().max_wait_s)
    for when_s, change in changes:
        simulation.at(when_s, partial(change, router))
    return simulation.run(calls)


def _between(records: Sequence[CallRecord], first: int, last: int) -> list[CallRecord]:
    """The calls that arrived within these minutes from the change."""
    begins_s, ends_s = (CHANGE_S + minute * MINUTE_S for minute in (first, last))
    return [record for record in records if begins_s <= record.arrived_s < ends_s]


def _e2e_s(records: Sequence[CallRecord], first: int, last: int) -> float:
    return fmean(record.e2e_s for record in _between(records, first, last))


def _claims(rows: Sequence[Row]) -> Iterator[Claim]:
    for change in dict.fromkeys(row.change for row in rows):
        found = [row for row in rows if row.change == change]
        if change.startswith("drained at once"):
            continue
        most = {"new engine": NEW_MOST, "faster engine": FASTER_MOST}.get(change, DRAINED_MOST)
        yield Claim(f"mean E2E, {change}", _geometric(found), most=most)
    share = fmean(row.share for row in rows if row.change == "new engine")
    yield Claim("share of a new engine in its 2nd minute", share, least=NEW_SHARE)


def _geometric(rows: Sequence[Row]) -> float:
    return exp(fmean(log(row.ratio) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
