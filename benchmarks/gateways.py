"""Several gateways over one fleet, which hear of each other from the engines or not: `python -m benchmarks gateways`.

In virtual time: routers, admission, reports and engine cores are the real ones, with their defaults. Calls go to the
gateways in turn. Each figure is the ratio to one gateway with the same calls, whose reports come at once. A single
gateway is tried with late reports, too: as it is, and as a router that hears of its own calls from engines only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from benchmarks.schedulers.claims import Claim
from benchmarks.workers import run_all
from e2e.traces import TRACES
from plait.gateway.simulation.compare import Experiment, after_warm_up, prepare, saturation_rate, simulate, summarise
from plait.gateway.simulation.shared_prefixes import Kind
from plait.gateway.simulation.simulate import CallRecord

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

    experiment: Experiment
    loads: tuple[float, ...]
    ways: tuple[tuple[int, Way, float], ...]

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        return Runner(replace(self.experiment, traces=traces if traces.is_dir() else None), self.loads, self.ways)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks: each load, and each of the `ways`, with so many gateways and a delay of the reports in seconds."""

    experiment: Experiment
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
    """Run, print, write; returns 1 if a claim does not hold."""
    arguments = _arguments()
    experiment = Experiment(
        calls=arguments.calls, engines=arguments.engines, working_set=4.0, report_interval_s=INTERVAL_S
    )
    tasks = [Task(kind, seed) for seed in arguments.seeds for kind in arguments.kinds]
    ways = tuple(_ways(arguments.gateways, blind=not arguments.only_told))
    runner = NewRunner(experiment, tuple(arguments.loads), ways)
    found = list[Ratios]()
    for _, some in run_all(runner, arguments.traces, tasks, arguments.jobs):
        found += some
        print("\n".join(map(_progress, some)), file=sys.stderr, flush=True)
    made = list(claims(found))
    print("\n".join((*markdown(found), "", *map(_line, made))))
    if arguments.json is not None:
        report = {"ratios": [asdict(one) for one in found], "claims": [asdict(claim) for claim in made]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(not all(claim.holds for claim in made))


def claims(found: Sequence[Ratios]) -> Iterator[Claim]:
    """The bounds on the geometric means of gateways that hear of each other, and on one that hears of itself."""
    for (count, name), bound in BOUNDS.items():
        told = [one for one in found if one.gateways == count and one.way == "told"]
        if told:
            value = _mean(told, name)
            yield Claim(f"mean {name} of {count} gateways over one's", value, bound, value <= bound, "geometric mean")
    by_reports = [one for one in found if one.way == "by reports"]
    for name in ("TTFT", "E2E") if by_reports else ():
        value = _mean(by_reports, name)
        what = f"mean {name} of one that hears of its own calls by reports"
        yield Claim(what, value, OF_ONE, value <= OF_ONE, "geometric mean")
    elsewhere = fmean(one.elsewhere for one in found if (one.gateways, one.way) == (1, "blind"))
    yield Claim("calls that one gateway places elsewhere if it is told", elsewhere, 0.0, elsewhere == 0, "share")


def markdown(found: Sequence[Ratios]) -> Iterator[str]:
    """A row for each kind, load and count of gateways: geometric means over the seeds."""
    yield "| prompts, load, gateways | blind: TTFT / E2E / hit rate | told: TTFT / E2E / hit rate |"
    yield "|---|---|---|"
    for row in sorted({(one.kind, one.load, one.gateways) for one in found}):
        cells = []
        for ways in ({"blind"}, {"told", "by reports"}):
            of = [one for one in found if (one.kind, one.load, one.gateways) == row and one.way in ways]
            if not of:
                cells.append("-")
                continue
            hit_rate = fmean(one.hit_rate for one in of)
            cells.append(f"{_mean(of, 'TTFT'):.2f} / {_mean(of, 'E2E'):.2f} / {hit_rate:.3f}")
        yield f"| {row[0]}, {row[1]:g}, {row[2]} | {cells[0]} | {cells[1]} |"


def _mean(found: Sequence[Ratios], name: str) -> float:
    return math.exp(fmean(math.log(one.ttft if name == "TTFT" else one.e2e) for one in found))


def _line(claim: Claim) -> str:
    return f"- {'holds' if claim.holds else 'FAILS'}: {claim.name}: {claim.value:.3f} (target {claim.target:.3f})"


def _progress(one: Ratios) -> str:
    where = f"{one.kind}, seed {one.seed}, load {one.load:g}, {one.gateways} {one.way}"
    return f"{where}: TTFT {one.ttft:.3f}, E2E {one.e2e:.3f}, hit rate {one.hit_rate:.3f}"


def _quiet(_what: str, _done: int, _of: int) -> None:
    """No progress."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    parser.add_argument("--traces", type=Path, default=TRACES, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=3000, help="of a run (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--gateways", type=int, nargs="+", default=COUNTS, help="default: 4 16")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="in round robin's saturation")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS, help="of prompts (default: both)")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3, 4, 5), help="default: 1 to 5")
    parser.add_argument("--only-told", action="store_true", help="leave out several blind gateways: half of the time")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
