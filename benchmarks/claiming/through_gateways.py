"""Questions about documents that come and go, through four gateways and through one. Nobody names a session.

Each gateway sees a part of a document's questions. None of them is of a session, so the gate for sessions holds none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Final

import structlog

from benchmarks.filling.systems import FleetSize, simulated
from benchmarks.placing.workloads import open_loops
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.config.sections import AdmissionConfig
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.simulate import Simulation

GATEWAYS: Final = 4
WARM_UP: Final = 0.2
LOOK_S: Final = 0.1
"""What is held is counted so often."""

BOUNDS: Final[Mapping[str, float]] = {"video": 1.25, "loogle": 1.35}
"""Mean E2E over that of one gateway."""


@dataclass(frozen=True, slots=True)
class Task:
    """A workload at a rate in calls/s on four engines."""

    workload: str
    rate_per_s: float
    calls: int
    seed: int


@dataclass(frozen=True, slots=True)
class Through:
    """Mean E2E through several gateways over that through one, and the most calls that were held at a time."""

    e2e: float
    held: int


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks."""

    traces: Path

    def __call__(self, task: Task) -> Through:
        """With one gateway, and with several."""
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        one_s, _ = self._run(task, 1)
        several_s, held = self._run(task, GATEWAYS)
        return Through(several_s / one_s, held)

    def _run(self, task: Task, gateways: int) -> tuple[float, int]:
        """The mean E2E of the calls after the first ones, in seconds, and the most that were held at a time."""
        _, simulation = simulated(FleetSize(gateways=gateways), "plait", AHEAD_S, AdmissionConfig().max_wait_s)
        calls = open_loops(self.traces)[task.workload](task.calls, task.rate_per_s, task.seed)
        held = [0]
        for look in range(int(calls[-1].arrives_s / LOOK_S)):
            simulation.at(look * LOOK_S, lambda _now_s: held.append(_held(simulation)))
        records = simulation.run(calls)
        counted_s = calls[round(WARM_UP * len(calls))].arrives_s
        return fmean(record.e2e_s for record in records if record.arrived_s >= counted_s), max(held)


def _held(simulation: Simulation) -> int:
    return sum(len(gate.held) for each in simulation.admissions for gate in each.sessions.gates.values())


def new_runner(traces: Path) -> Callable[[Task], Through]:
    """Makes a runner in a worker process."""
    return Runner(traces)


def claims(found: Mapping[Task, Through]) -> Iterator[Claim]:
    """For each workload: the E2E, and that nothing was held."""
    for name in dict.fromkeys(task.workload for task in found):
        of = [through for task, through in found.items() if task.workload == name]
        e2e, bound, held = geometric_mean(one.e2e for one in of), BOUNDS[name], max(one.held for one in of)
        yield Claim(f"mean E2E, {GATEWAYS} gateways / one, {name}", e2e, most=bound)
        yield Claim(f"calls held for a session, {name}", held, most=0)
