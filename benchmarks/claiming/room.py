"""What is claimed of placement where engines have room for copies of the documents that are asked about often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benchmarks.claiming.placement import WITHIN
from benchmarks.placing.held_cells import ROOM, SMALL_ROOM, Task
from benchmarks.placing.policy_runs import OURS, Figures
from benchmarks.placing.published_report import geometric
from plait.lab.simulation.claim import Claim

RIVALS: Final = ("smg", "lmetric")
"""The best two of six in the cell of 64 engines."""
MOST: Final[Mapping[str, float]] = {ROOM: 1.06, SMALL_ROOM: WITHIN}
"""What ours may take of a rival's mean E2E, by cell. One run of 16 engines differs from the next by a tenth."""


def tasks_of(cell: str, seeds: Sequence[int]) -> list[Task]:
    """Ours and each rival, seed by seed."""
    return [Task(cell, seed, policy) for seed in seeds for policy in (OURS, *RIVALS)]


def room_claims(found: Mapping[Task, Figures]) -> Iterator[Claim]:
    """Mean E2E of each rival over ours with the same seed: the geometric mean of the seeds."""
    for cell in dict.fromkeys(task.cell for task in found):
        for rival in RIVALS:
            theirs = {task.seed: one.e2e_s for task, one in found.items() if (task.cell, task.policy) == (cell, rival)}
            times = [e2e_s / found[Task(cell, seed, OURS)].e2e_s for seed, e2e_s in theirs.items()]
            yield Claim(f"mean E2E, {rival} / {OURS}, {cell}", geometric(times), least=1 / MOST[cell])
