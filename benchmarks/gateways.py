"""Several gateways over one fleet, which hear of each other from the engines or not: `python -m benchmarks gateways`.

In virtual time: routers, admission, reports and engine cores are the real ones, with their defaults. Calls go to the
gateways in turn. Each figure is the ratio to one gateway with the same calls, whose reports come at once. A single
gateway is tried with late reports, too: as it is, and as a router that hears of its own calls from engines only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import Experiment as Comparison
from plait.lab.simulation.compare import after_warm_up, prepare, saturation_rate, simulate, summarise
from plait.lab.simulation.shared_prefixes import Kind
from plait.lab.simulation.simulate import CallRecord

KINDS: Final[tuple[Kind, ...]] = ("document", "tools")
LOADS: Final = (0.9, 1.5)
COUNTS: Final = (4, 16)
INTERVAL_S: Final = 0.02
"""The gateway's own least time between two reports of an engine."""
DELAY_S: Final = 0.01
"""So news is 10 to 30 ms late."""
Way = Literal["blind", "told", "by reports"]
"""How gateways hear of calls: of their own alone; of others' by reports; of their own first tokens and ends, too."""
OF_ONE: Final = 1.06
"""For a gateway that hears of its own calls' first tokens and ends by reports: the bound for TTFT and E2E."""
BOUNDS: Final[Mapping[tuple[int, str], float]] = {
    (4, "TTFT"): 1.25,
    (16, "TTFT"): 1.35,
    (4, "E2E"): 1.06,
    (16, "E2E"): 1.06,
}


@dataclass(frozen=True, slots=True)
class Task:
    """A workload of one kind of prompts, with a seed."""

    kind: Kind
    seed: int


@dataclass(frozen=True, slots=True)
class Ratios:
    """Mean TTFT and mean E2E of so many gateways over those of one, at a load in round robin's saturation.

    `elsewhere` is the share of the calls that went to another engine than with the one.
    """

    kind: Kind
    seed: int
    load: float
    gateways: int
    way: Way
    ttft: float
    e2e: float
    hit_rate: float
    elsewhere: float


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Makes a runner in a worker process."""

    experiment: Comparison
    loads: tuple[float, ...]
    ways: tuple[tuple[int, Way, float], ...]

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        return Runner(replace(self.experiment, traces=traces if traces.is_dir() else None), self.loads, self.ways)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks: each load, and each of the `ways`, with so many gateways and a delay of the reports in seconds."""

    experiment: Comparison
    loads: tuple[float, ...]
    ways: tuple[tuple[int, Way, float], ...]

    def __call__(self, task: Task) -> list[Ratios]:
        """All loads and counts of gateways on one workload."""
        experiment = replace(self.experiment, kinds=(task.kind,), seed=task.seed)
        workload = prepare(experiment, _quiet)
        saturation_per_s = saturation_rate(experiment, workload, _quiet)
        found = []
        for load in self.loads:

            def run(count: int, way: Way, delay_s: float, load: float = load) -> Sequence[CallRecord]:
                tried = replace(
                    experiment,
                    gateways=count,
                    blind=way == "blind",
                    ends_by_reports=way == "by reports",
                    report_delay_s=delay_s,
                )
                return after_warm_up(simulate(tried, workload, "plait", load * saturation_per_s, _quiet))

            one = run(1, "told", 0.0)
            found += [
                Ratios(task.kind, task.seed, load, count, way, *_compared(run(count, way, delay_s), one))
                for count, way, delay_s in self.ways
            ]
        return found


def _ways(counts: Sequence[int], *, blind: bool) -> Iterator[tuple[int, Way, float]]:
    """So many gateways, how they hear, and how late."""
    yield 1, "blind", 0.0
    yield 1, "by reports", DELAY_S
    for count in counts:
        if blind:
            yield count, "blind", DELAY_S
        yield count, "told", DELAY_S


def _compared(records: Sequence[CallRecord], one: Sequence[CallRecord]) -> tuple[float, float, float, float]:
    """TTFT and E2E over those of one gateway, the hit rate, and the share of calls that are elsewhere."""
    of, by = summarise("plait", records), summarise("plait", one)
    elsewhere = fmean(record.engine_id != other.engine_id for record, other in zip(records, one, strict=True))
    return of.ttft_mean_s / by.ttft_mean_s, of.e2e_mean_s / by.e2e_mean_s, of.hit_rate, elsewhere


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, seeds=(1, 2, 3, 4, 5))
    made.add_argument("--calls", type=int, default=3000, help="of a run (default: %(default)s)")
    made.add_argument("--engines", type=int, default=8, help="default: %(default)s")
    made.add_argument("--gateways", type=int, nargs="+", default=COUNTS, help="default: 4 16")
    made.add_argument("--loads", type=float, nargs="+", default=LOADS, help="in round robin's saturation")
    made.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS, help="of prompts (default: both)")
    made.add_argument("--only-told", action="store_true", help="leave out several blind gateways: half of the time")
    arguments = made.parse_args()
    inputs = Comparison(calls=arguments.calls, engines=arguments.engines, working_set=4.0, report_interval_s=INTERVAL_S)
    tasks = [Task(kind, seed) for seed in arguments.seeds for kind in arguments.kinds]
    ways = tuple(_ways(arguments.gateways, blind=not arguments.only_told))
    return conduct("gateways", Experiment(tasks, NewRunner(inputs, tuple(arguments.loads), ways), report), arguments)


def report(by_task: Mapping[Task, Sequence[Ratios]]) -> Report:
    """The report on the ratios of all tasks."""
    found = [one for some in by_task.values() for one in some]
    return Report(lines=list(markdown(found)), claims=list(claims(found)), results=[asdict(one) for one in found])


def claims(found: Sequence[Ratios]) -> Iterator[Claim]:
    """The bounds on the geometric means of gateways that hear of each other, and on one that hears of itself."""
    for (count, name), bound in BOUNDS.items():
        told = [one for one in found if one.gateways == count and one.way == "told"]
        if told:
            value = _mean(told, name)
            yield Claim(f"mean {name} of {count} gateways over one's", value, most=bound, where="geometric mean")
    by_reports = [one for one in found if one.way == "by reports"]
    for name in ("TTFT", "E2E") if by_reports else ():
        value = _mean(by_reports, name)
        what = f"mean {name} of one that hears of its own calls by reports"
        yield Claim(what, value, most=OF_ONE, where="geometric mean")
    elsewhere = fmean(one.elsewhere for one in found if (one.gateways, one.way) == (1, "blind"))
    yield Claim("calls that one gateway places elsewhere if it is told", elsewhere, most=0, where="share")


def markdown(found: Sequence[Ratios]) -> Iterator[str]:
    """A row for each kind, load and count of gateways: geometric means over the seeds."""
    rows = []
    for kind, load, count in sorted({(one.kind, one.load, one.gateways) for one in found}):
        cells = [f"{kind}, {load:g}, {count}"]
        for ways in ({"blind"}, {"told", "by reports"}):
            of = [one for one in found if (one.kind, one.load, one.gateways) == (kind, load, count) and one.way in ways]
            hit_rate = fmean(one.hit_rate for one in of) if of else 0.0
            cells.append(f"{_mean(of, 'TTFT'):.2f} / {_mean(of, 'E2E'):.2f} / {hit_rate:.3f}" if of else "-")
        rows.append(cells)
    return table(["prompts, load, gateways", *(f"{how}: TTFT / E2E / hit rate" for how in ("blind", "told"))], rows)


def _mean(found: Sequence[Ratios], name: str) -> float:
    return math.exp(fmean(math.log(one.ttft if name == "TTFT" else one.e2e) for one in found))


def _quiet(_what: str, _done: int, _of: int) -> None:
    """No progress."""


if __name__ == "__main__":
    sys.exit(main())
