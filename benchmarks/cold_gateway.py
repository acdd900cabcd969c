"""How a gateway places that has just started, beside one that placed all calls: `python -m benchmarks cold_gateway`.

In virtual time: routers, admission, reports and engine cores are the real ones, with their defaults. Half of the calls
go to one gateway. Then another starts, asks the engines for 2 s, and takes the next 1,000 calls. The same calls go to a
gateway that knows all that was before. Each engine reports its cache and its outstanding calls.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.gateways import DELAY_S, INTERVAL_S, KINDS, LOADS
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import COLD_S, prepare, saturation_rate, simulate, summarise
from plait.lab.simulation.compare import Experiment as Comparison
from plait.lab.simulation.shared_prefixes import Kind
from plait.lab.simulation.simulate import CallRecord

POINTS: Final = 0.02
"""So much of the hit rate may be lost."""
NEXT_CALLS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Found:
    """The hit rates, and the mean TTFTs in seconds, of the same calls at a load in round robin's saturation."""

    kind: Kind
    seed: int
    load: float
    warm: float
    cold: float
    warm_ttft_s: float
    cold_ttft_s: float


Task = tuple[Kind, int]
"""A kind of prompts, and a seed."""


@dataclass(frozen=True, slots=True)
class Runner:
    """Compares a warm gateway with a cold one, on prompts of a kind with a seed."""

    traces: Path
    calls: int
    engines: int

    def __call__(self, task: Task) -> list[Found]:
        """At each load."""
        kind, seed = task
        inputs = Comparison(
            traces=self.traces if self.traces.is_dir() else None,
            calls=self.calls,
            engines=self.engines,
            working_set=4.0,
            kinds=(kind,),
            seed=seed,
            report_interval_s=INTERVAL_S,
            report_delay_s=DELAY_S,
        )
        workload = prepare(inputs, _quiet)
        saturation_per_s, before = saturation_rate(inputs, workload, _quiet), inputs.calls // 2
        found = []
        for load in LOADS:
            warm, cold = (
                _next(simulate(tried, workload, "plait", load * saturation_per_s, _quiet), before)
                for tried in (inputs, replace(inputs, replaced_after=before))
            )
            rates = (summarise("plait", records).hit_rate for records in (warm, cold))
            found.append(Found(kind, seed, load, *rates, *map(_ttft_s, (warm, cold))))
        return found


def main() -> int:
    """Run and print; returns 1 if the bound does not hold."""
    made = parser(__doc__, seeds=(1, 2, 3))
    made.add_argument("--calls", type=int, default=3_000, help="of a run (default: %(default)s)")
    made.add_argument("--engines", type=int, default=8, help="default: %(default)s")
    arguments = made.parse_args()
    tasks = [(kind, seed) for kind in KINDS for seed in arguments.seeds]
    new_runner = partial(Runner, calls=arguments.calls, engines=arguments.engines)
    return conduct("cold_gateway", Experiment(tasks, new_runner, _report), arguments)


def _report(by_task: Mapping[Task, Sequence[Found]]) -> Report:
    found = [one for some in by_task.values() for one in some]
    rows = (
        [
            f"{one.kind}, {one.seed}, {one.load:g}",
            f"{one.warm:.4f} / {one.cold:.4f}",
            f"{1e3 * one.warm_ttft_s:.0f} / {1e3 * one.cold_ttft_s:.0f}",
        ]
        for one in found
    )
    columns = ["prompts, seed, load", "hit rate: warm / cold", "mean TTFT: warm / cold, ms"]
    lost = [one.warm - one.cold for one in found]
    claim = Claim("hit rate that a cold gateway loses, mean", fmean(lost), most=POINTS, where=f"worst: {max(lost):.4f}")
    return Report(lines=list(table(columns, rows)), claims=[claim], results=[asdict(one) for one in found])


def _next(records: Sequence[CallRecord], before: int) -> Sequence[CallRecord]:
    """The calls that the second gateway takes first, in the order of their arrival."""
    ordered = sorted(records, key=lambda record: record.arrived_s)
    takes_s = ordered[before - 1].arrived_s + COLD_S
    return [record for record in ordered if record.arrived_s > takes_s][:NEXT_CALLS]


def _ttft_s(records: Sequence[CallRecord]) -> float:
    return fmean(record.ttft_s for record in records)


def _quiet(_what: str, _done: int, _of: int) -> None:
    """No progress."""


if __name__ == "__main__":
    sys.exit(main())
