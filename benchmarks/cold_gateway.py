"""How a gateway places that has just started, beside one that placed all calls: `python -m benchmarks cold_gateway`.

In virtual time: routers, admission, reports and engine cores are the real ones, with their defaults. Half of the calls
go to one gateway. Then another starts, asks the engines for 2 s, and takes the next 1,000 calls. The same calls go to a
gateway that knows all that was before. Each engine reports its cache and its outstanding calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.gateways import DELAY_S, INTERVAL_S, KINDS, LOADS
from benchmarks.schedulers.claims import Claim
from e2e.traces import TRACES
from plait.gateway.simulation.compare import COLD_S, Experiment, prepare, saturation_rate, simulate, summarise
from plait.gateway.simulation.shared_prefixes import Kind
from plait.gateway.simulation.simulate import CallRecord

POINTS: Final = 0.02
"""So much of the hit rate may be lost."""
NEXT_CALLS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Found:
    """The hit rates, and the mean TTFTs in seconds, of the same calls."""

    warm: float
    cold: float
    warm_ttft_s: float
    cold_ttft_s: float


def main() -> int:
    """Run and print; returns 1 if the bound does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=3_000, help="of a run (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3), help="default: 1 to 3")
    arguments = parser.parse_args()
    print("| prompts, seed, load | hit rate: warm / cold | mean TTFT: warm / cold, ms |")
    print("|---|---|---|")
    found = list[Found]()
    for kind in KINDS:
        for seed in arguments.seeds:
            experiment = Experiment(
                traces=arguments.traces if arguments.traces.is_dir() else None,
                calls=arguments.calls,
                engines=arguments.engines,
                working_set=4.0,
                kinds=(kind,),
                seed=seed,
                report_interval_s=INTERVAL_S,
                report_delay_s=DELAY_S,
            )
            found += _compared(experiment, kind)
    lost = fmean(one.warm - one.cold for one in found)
    claim = Claim("hit rate that a cold gateway loses", lost, POINTS, lost <= POINTS, "mean")
    print(f"\n{'holds' if claim.holds else 'FAILS'}: {claim.name}: {claim.value:.4f} (target {claim.target:g})")
    print(f"worst: {max(one.warm - one.cold for one in found):.4f}")
    return int(not claim.holds)


def _compared(experiment: Experiment, kind: Kind) -> list[Found]:
    """Warm and cold at each load."""
    workload = prepare(experiment, _quiet)
    saturation_per_s, before = saturation_rate(experiment, workload, _quiet), experiment.calls // 2
    found = []
    for load in LOADS:
        warm, cold = (
            _next(simulate(tried, workload, "plait", load * saturation_per_s, _quiet), before)
            for tried in (experiment, replace(experiment, replaced_after=before))
        )
        one = Found(*(summarise("plait", records).hit_rate for records in (warm, cold)), *map(_ttft_s, (warm, cold)))
        print(
            f"| {kind}, {experiment.seed}, {load:g} | {one.warm:.4f} / {one.cold:.4f} "
            f"| {1e3 * one.warm_ttft_s:.0f} / {1e3 * one.cold_ttft_s:.0f} |",
            flush=True,
        )
        found.append(one)
    return found


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
