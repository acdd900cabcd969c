"""What is claimed of the engines' scheduler on AccelGen's mixed prompts, by load, against schedules that know more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benchmarks.mixed_prompts import LONG_SHARE, PUBLISHED_PER_S
from benchmarks.schedulers.claims import FCFS, FEW_LOST, by_load
from benchmarks.schedulers.sweep import BRIEF, Point, Task, means, mix_of
from benchmarks.schedulers.systems import OURS
from plait.lab.simulation.claim import Claim

RATES: Final = (2.0, PUBLISHED_PER_S)
"""The engine completes some 1.2 calls/s."""
QUICK_RATES: Final = RATES[:1]
RIVALS: Final = (*FCFS, "srpt", FEW_LOST)
"""Of the clairvoyant schedules, that of the most goodput."""
CALLS: Final = 300
"""With a hundred, ours seems better than every clairvoyant schedule: most of them come before the KV is full."""


def tasks(seeds: Sequence[int], *, quick: bool) -> list[Task]:
    """Ours, FCFS and clairvoyant schedules at each rate."""
    points = [
        Point(BRIEF, "range", LONG_SHARE, rate, system)
        for rate in (QUICK_RATES if quick else RATES)
        for system in (OURS, *RIVALS)
    ]
    return [(point, mix_of(point, CALLS, seed)) for point in points for seed in seeds]


def claims(found: Mapping[Task, Mapping[str, float]]) -> Iterator[Claim]:
    """Goodput over that of clairvoyant schedules, and throughput over FCFS's."""
    return by_load(means(found))
