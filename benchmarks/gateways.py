"""Several gateways over one fleet, which hear of each other from the engines or not: `python -m benchmarks gateways`.

In virtual time: routers, admission, reports and engine cores are the real ones, with their defaults. Calls go to the
gateways in turn. Each figure is the ratio to one gateway with the same calls.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.schedulers.claims import Claim
from benchmarks.workers import run_all
from e2e.traces import TRACES
from plait.gateway.simulation.compare import Experiment, after_warm_up, prepare, saturation_rate, simulate, summarise
from plait.gateway.simulation.shared_prefixes import Kind

KINDS: Final[tuple[Kind, ...]] = ("document", "tools")
LOADS: Final = (0.9, 1.5)
COUNTS: Final = (4, 16)
INTERVAL_S: Final = 0.02
"""The gateway's own least time between two reports of an engine."""
DELAY_S: Final = 0.01
"""So news is 10 to 30 ms late."""
BOUNDS: Final = {(4, "TTFT"): 1.25, (16, "TTFT"): 1.35, (4, "E2E"): 1.06, (16, "E2E"): 1.06}


@dataclass(frozen=True, slots=True)
class Task:
    """A workload of one kind of prompts, with a seed."""

    kind: Kind
    seed: int


@dataclass(frozen=True, slots=True)
class Ratios:
    """Mean TTFT and mean E2E of so many gateways over those of one, at a load in round robin's saturation."""

    kind: Kind
    seed: int
    load: float
    gateways: int
    blind: bool
    ttft: float
    e2e: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Makes a runner in a worker process."""

    experiment: Experiment
    loads: tuple[float, ...]
    counts: tuple[int, ...]

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        return Runner(replace(self.experiment, traces=traces if traces.is_dir() else None), self.loads, self.counts)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks."""

    experiment: Experiment
    loads: tuple[float, ...]
    counts: tuple[int, ...]

    def __call__(self, task: Task) -> list[Ratios]:
        """All loads and counts of gateways on one workload."""
        experiment = replace(self.experiment, kinds=(task.kind,), seed=task.seed)
        workload = prepare(experiment, _quiet)
        saturation_per_s = saturation_rate(experiment, workload, _quiet)
        found = []
        for load in self.loads:
            means = {}
            for count, blind in [(1, False), *((count, blind) for count in self.counts for blind in (True, False))]:
                tried = replace(experiment, gateways=count, blind=blind, report_delay_s=DELAY_S if count > 1 else 0.0)
                records = simulate(tried, workload, "plait", load * saturation_per_s, _quiet)
                means[count, blind] = summarise("plait", after_warm_up(records))
            one = means.pop((1, False))
            found += [
                Ratios(
                    *(task.kind, task.seed, load, count, blind),
                    *(of.ttft_mean_s / one.ttft_mean_s, of.e2e_mean_s / one.e2e_mean_s, of.hit_rate),
                )
                for (count, blind), of in means.items()
            ]
        return found


def main() -> int:
    """Run, print, write; returns 1 if a claim does not hold."""
    arguments = _arguments()
    experiment = Experiment(
        calls=arguments.calls, engines=arguments.engines, working_set=4.0, report_interval_s=INTERVAL_S
    )
    tasks = [Task(kind, seed) for kind in KINDS for seed in arguments.seeds]
    runner = NewRunner(experiment, tuple(arguments.loads), tuple(arguments.gateways))
    found = [ratios for _, some in run_all(runner, arguments.traces, tasks, arguments.jobs) for ratios in some]
    made = list(claims(found))
    print("\n".join((*markdown(found), "", *map(_line, made))))
    if arguments.json is not None:
        report = {"ratios": [asdict(one) for one in found], "claims": [asdict(claim) for claim in made]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(not all(claim.holds for claim in made))


def claims(found: Sequence[Ratios]) -> Iterator[Claim]:
    """The bounds on the geometric means of gateways that hear of each other."""
    for (count, name), bound in BOUNDS.items():
        told = [one for one in found if one.gateways == count and not one.blind]
        if told:
            value = _mean(told, name)
            yield Claim(f"mean {name} of {count} gateways over one's", value, bound, value <= bound, "geometric mean")


def markdown(found: Sequence[Ratios]) -> Iterator[str]:
    """A row for each kind, load and count of gateways: geometric means over the seeds."""
    yield "| prompts, load, gateways | blind: TTFT / E2E / hit rate | told: TTFT / E2E / hit rate |"
    yield "|---|---|---|"
    for row in sorted({(one.kind, one.load, one.gateways) for one in found}):
        cells = []
        for blind in (True, False):
            of = [one for one in found if (one.kind, one.load, one.gateways, one.blind) == (*row, blind)]
            hit_rate = fmean(one.hit_rate for one in of)
            cells.append(f"{_mean(of, 'TTFT'):.2f} / {_mean(of, 'E2E'):.2f} / {hit_rate:.3f}")
        yield f"| {row[0]}, {row[1]:g}, {row[2]} | {cells[0]} | {cells[1]} |"


def _mean(found: Sequence[Ratios], name: str) -> float:
    return math.exp(fmean(math.log(one.ttft if name == "TTFT" else one.e2e) for one in found))


def _line(claim: Claim) -> str:
    return f"- {'holds' if claim.holds else 'FAILS'}: {claim.name}: {claim.value:.3f} (target {claim.target:.3f})"


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
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3, 4, 5), help="default: 1 to 5")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
