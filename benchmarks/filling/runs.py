"""The runs: each system under each load of a workload, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Final

from benchmarks.filling.systems import NONE, FleetSize, systems
from benchmarks.filling.workloads import workloads
from plait.lab.simulation.compare import summarise
from plait.lab.simulation.simulate import CallRecord, SimulatedCall

AT_ONCE: Final = inf
"""The load under which all calls arrive at the start."""
LOADS: Final = (0.5, 0.75, 0.95, 1.5, 3.0)


@dataclass(frozen=True, slots=True)
class Point:
    """A run. `load` is the rate of arrival, in units of the workload's best saturation with this seed."""

    workload: str
    load: float
    system: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run gave; times in seconds. Times and the hit rate are of the calls that were completed."""

    calls: int
    """All calls that arrived."""
    rate_per_s: float
    """Of arrival; infinite if all calls came at once."""
    refused_calls: int
    """Calls without an answer."""
    ttft_mean_s: float
    ttft_p99_s: float
    ttft_longest_s: float
    e2e_mean_s: float
    hit_rate: float
    """The part of the prompts' tokens that was in the cache."""
    completed_per_s: float
    """Completed calls over the time until the last of them ended."""
    timely_per_s: float
    """The calls that were completed by the time of the last arrival, over that time; 0 if all came at once."""


Results = Mapping[Point, Figures]
Task = tuple[str, int]
"""A workload and a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the fleet is loaded.

    All at once: at least `calls`, and about as many as take `at_once_s`. A load up to 1: at least `calls`, and those
    of `open_s`. A load beyond 1: those of `over_s`. The first `warm_up_share` of the calls does not count in the times
    and hit rates of loads up to 1.
    """

    systems: tuple[str, ...]
    fleet: FleetSize
    loads: tuple[float, ...] = LOADS
    calls: int = 800
    at_once_s: float = 120.0
    open_s: float = 240.0  # four periods of the bursts
    over_s: float = 120.0
    warm_up_share: float = 0.0

    def calls_at(self, load: float, rate_per_s: float) -> int:
        """How many calls arrive at a finite rate."""
        if load > 1:
            return max(1, round(self.over_s * rate_per_s))
        return max(self.calls, round(self.open_s * rate_per_s))


class Runner:
    """Runs every system under every load of one workload."""

    def __init__(self, plan: Plan, traces: Path) -> None:
        self._plan = plan
        self._workloads = workloads(traces)
        self._systems = systems(plan.fleet)

    def __call__(self, task: Task) -> dict[Point, Figures]:
        """The figures of each system; first all calls at once, which gives the saturation."""
        name, seed = task
        began_s = perf_counter()
        workload, loads = self._workloads[name], self._plan.loads
        found = self._at_once(name, seed)
        saturation_per_s = max(figures.completed_per_s for figures in found.values())
        for load in loads:
            rate_per_s = load * saturation_per_s
            calls = workload(self._plan.calls_at(load, rate_per_s), rate_per_s, seed)
            for system in self._plan.systems:
                found[Point(name, load, system, seed)] = self._run(system, calls, load, rate_per_s, seed)
        took_s = perf_counter() - began_s
        print(f"{name}, seed {seed}: saturation {saturation_per_s:.2f} calls/s; {took_s:.0f} s", file=sys.stderr)
        return found

    def _at_once(self, name: str, seed: int) -> dict[Point, Figures]:
        """All systems with the same calls: as many as one of them needs long enough for."""
        workload, plan = self._workloads[name], self._plan
        calls = workload(plan.calls, AT_ONCE, seed)
        first = self._run(NONE, calls, AT_ONCE, AT_ONCE, seed)
        found = {Point(name, AT_ONCE, NONE, seed): first}
        enough = round(plan.at_once_s * first.completed_per_s)
        if enough > plan.calls:
            calls, found = workload(enough, AT_ONCE, seed), {}
        for system in plan.systems:
            point = Point(name, AT_ONCE, system, seed)
            if point not in found:
                found[point] = self._run(system, calls, AT_ONCE, AT_ONCE, seed)
        return found

    def _run(self, system: str, calls: Sequence[SimulatedCall], load: float, rate_per_s: float, seed: int) -> Figures:
        _, simulation = self._systems[system](seed)
        records = simulation.run(calls)
        warm_up_s = calls[round(self._plan.warm_up_share * len(calls))].arrives_s if load <= 1 else 0.0
        return _figures(calls, [record for record in records if record.finished_s > 0], rate_per_s, warm_up_s)


def _figures(
    calls: Sequence[SimulatedCall], completed: Sequence[CallRecord], rate_per_s: float, warm_up_s: float
) -> Figures:
    """Of the calls that arrived and the records of those that were completed."""
    counted = [record for record in completed if record.arrived_s >= warm_up_s]
    outcome = summarise("", counted)
    last_arrival_s = calls[-1].arrives_s
    timely = sum(record.finished_s <= last_arrival_s for record in completed)
    return Figures(
        calls=len(calls),
        rate_per_s=rate_per_s,
        refused_calls=len(calls) - len(completed),
        ttft_mean_s=outcome.ttft_mean_s,
        ttft_p99_s=outcome.ttft_p99_s,
        ttft_longest_s=max(record.ttft_s for record in counted),
        e2e_mean_s=outcome.e2e_mean_s,
        hit_rate=outcome.hit_rate,
        completed_per_s=len(completed) / max(record.finished_s for record in completed),
        timely_per_s=timely / last_arrival_s if last_arrival_s else 0.0,
    )
