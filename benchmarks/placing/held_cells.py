"""The cells of `python -m benchmarks held`, each one workload on equal engines at one rate, and their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.filling.systems import FleetSize, simulated
from benchmarks.placing.policy_runs import KNOWN, OURS, Figures, figures
from benchmarks.placing.preble_published import GAMES_ALIVE, play
from benchmarks.placing.workloads import open_loops
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.config.placement_policy import placement_policy
from plait.gateway.config.sections import AdmissionConfig
from plait.lab.simulation.workload import poisson_arrivals
from plait.policy.placement.policies import Policy, by_name

GAMES: Final = "games"
ROOM, SMALL_ROOM = "documents 64", "documents 16"
"""Documents with room for copies on every engine."""

CHAOTIC_SEEDS, SEEDS = 8, 3
"""Near saturation two policies that differ in one decision of 200 may differ by a third in one run."""


@dataclass(frozen=True, slots=True)
class HeldCell:
    """A workload of `policies`, or `GAMES`."""

    workload: str
    engines: int
    per_s: float
    """Calls a second, of all engines."""
    calls: int
    seeds: int = SEEDS
    """The runs of each policy."""
    warm_up: float = 0.25
    """The part of the calls, from the first on, that is in no time or share."""


CELLS: Final[Mapping[str, HeldCell]] = {
    "documents 8": HeldCell("documents", 8, 6.2, 2_400, warm_up=0.5),
    ROOM: HeldCell("documents", 64, 23.0, 2_400),
    "documents 4": HeldCell("documents", 4, 5.2, 600, CHAOTIC_SEEDS),
    "games 12": HeldCell(GAMES, 4, 24.0, 3_600, CHAOTIC_SEEDS),
    "games 20": HeldCell(GAMES, 4, 40.0, 3_600, CHAOTIC_SEEDS),
    "loogle 2.7": HeldCell("loogle", 4, 2.7, 600, CHAOTIC_SEEDS),
    "loogle 3": HeldCell("loogle", 4, 3.0, 600, CHAOTIC_SEEDS),
    "video 8.5": HeldCell("video", 4, 8.5, 600),
    "video 11.2": HeldCell("video", 4, 11.2, 600, CHAOTIC_SEEDS),
    "mooncake": HeldCell("mooncake", 4, 1.75, 600),
    "tools 10": HeldCell("tools", 4, 10.0, 600),
    "tools 15": HeldCell("tools", 4, 15.0, 600),
}
"""Documents fill .45 of the KV of 8 engines and .06 of that of 64. Games are named by the rate of a pair of engines."""

SMALL: Final[Mapping[str, HeldCell]] = {SMALL_ROOM: HeldCell("documents", 16, 6.0, 400)}
"""Cells of seconds, each for a larger one."""

RIVALS: Final = ("smg", "lmetric", "llmd_latency", "e2", "sticky", "least_outstanding")
SMG: Final = "smg"
NO_MOVES, SMG_MOVES = "plait, no moves", "smg, moves"
MOVES: Final = ((OURS, NO_MOVES), (SMG_MOVES, SMG))
"""Each choice of engines with moves of waiting calls, and without."""


def _with_moves(of: str, name: str, *, moves_waiting: bool) -> Policy:
    return replace(KNOWN[of], name=name, title=name, moves_waiting=moves_waiting)


NAMED: Final = {
    **KNOWN,
    **by_name(
        _with_moves(OURS, NO_MOVES, moves_waiting=False),
        _with_moves(SMG, SMG_MOVES, moves_waiting=True),
    ),
}
"""Policies that can be named, beside `package.module:name`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run."""

    cell: str
    seed: int
    policy: str


class Runner:
    """Runs tasks."""

    def __init__(self, traces: Path) -> None:
        self._workloads = open_loops(traces)

    def __call__(self, task: Task) -> Figures:
        cell, policy = {**SMALL, **CELLS}[task.cell], placement_policy(task.policy, known=NAMED)
        _, simulation = simulated(FleetSize(engines=cell.engines), policy, AHEAD_S, AdmissionConfig().max_wait_s)
        if cell.workload == GAMES:
            arrivals_s = poisson_arrivals(cell.calls, cell.per_s, task.seed)
            play(simulation, GAMES_ALIVE * cell.engines, arrivals_s, task.seed)
        else:
            calls = self._workloads[cell.workload](cell.calls, cell.per_s, task.seed)
            arrivals_s = [call.arrives_s for call in calls]
            simulation.run(calls)
        return figures(simulation, arrivals_s[round(cell.warm_up * len(arrivals_s))])
