"""What is claimed of admission: ratios within one run, fixed before any run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from benchmarks.filling.runs import AT_ONCE, Point, Results
from benchmarks.filling.systems import ADMISSION, BASELINES, NONE
from plait.lab.simulation.claim import Claim

STEADY_LIMITS: Final = {"e2e_mean_s": ("mean E2E", 1.03, 1.10), "ttft_mean_s": ("mean TTFT", 1.08, 1.35)}
"""By figure: at most so many times as long as without admission, in the geometric mean and at the worst load."""
HIT_RATE_LOSS: Final = 0.02
LEAST_COMPLETED: Final = 0.95
"""Of what the better baseline completes, at the worst load."""


@dataclass(frozen=True, slots=True)
class Place:
    """A workload under a load."""

    workload: str
    load: float

    def __str__(self) -> str:
        return f"{self.workload} {load_name(self.load)}"


def load_name(load: float) -> str:
    """A load as a reader is told it."""
    return "at once" if load == AT_ONCE else f"{load:g}"


def places(results: Results) -> list[Place]:
    """All workloads under all loads, in the order of the runs."""
    return list(dict.fromkeys(Place(point.workload, point.load) for point in results))


def seeds(results: Results, place: Place) -> list[int]:
    """The seeds with which a place was run."""
    return sorted({p.seed for p in results if (p.workload, p.load) == (place.workload, place.load)})


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values."""
    return math.exp(fmean(map(math.log, values)))


def ratio(results: Results, place: Place, system: str, field: str, bases: Sequence[str] = (NONE,)) -> float:
    """A system's figure over the greatest of the bases' ones; the geometric mean over the seeds."""
    return geometric_mean(
        [
            _figure(results, place, system, seed, field) / max(_figure(results, place, b, seed, field) for b in bases)
            for seed in seeds(results, place)
        ]
    )


def hit_rate_loss(results: Results, place: Place, system: str) -> float:
    """How much lower the hit rate is than without admission; the mean over the seeds."""
    return fmean(
        _figure(results, place, NONE, seed, "hit_rate") - _figure(results, place, system, seed, "hit_rate")
        for seed in seeds(results, place)
    )


def claims(results: Results) -> Iterator[Claim]:
    """Those that the loads of this run allow; none without admission."""
    if ADMISSION not in {point.system for point in results}:
        return
    steady = [place for place in places(results) if place.load <= 1]
    if steady:
        yield from _steady(results, steady)
    over = [place for place in places(results) if place.load > 1]
    if over:
        yield from _over(results, over)


def _steady(results: Results, steady: Sequence[Place]) -> Iterator[Claim]:
    """While the engines keep up, admission costs little."""
    for field, (name, mean_limit, worst_limit) in STEADY_LIMITS.items():
        ratios = {place: ratio(results, place, ADMISSION, field) for place in steady}
        where = max(ratios, key=ratios.__getitem__)
        yield _at_most(f"{name}, {ADMISSION} / {NONE}, loads up to 1", geometric_mean([*ratios.values()]), mean_limit)
        yield _at_most(f"{name}, {ADMISSION} / {NONE}, at its worst ({where})", ratios[where], worst_limit)
    losses = {place: hit_rate_loss(results, place, ADMISSION) for place in steady}
    where = max(losses, key=losses.__getitem__)
    yield _at_most(f"hit rate, {NONE} - {ADMISSION}, at its worst ({where})", losses[where], HIT_RATE_LOSS)


def _over(results: Results, over: Sequence[Place]) -> Iterator[Claim]:
    """Beyond saturation, it completes as many calls as the better baseline, and no later than without it."""
    bases = [name for name in BASELINES if name in {point.system for point in results}]
    ratios = {place: ratio(results, place, ADMISSION, "completed_per_s", bases) for place in over}
    where = min(ratios, key=ratios.__getitem__)
    name = f"completed calls/s, {ADMISSION} / the better of {', '.join(bases)}"
    worst, mean = ratios[where], geometric_mean([*ratios.values()])
    yield Claim(f"{name}, at its worst ({where})", worst, least=LEAST_COMPLETED)
    yield Claim(f"{name}, loads beyond 1", mean, least=math.nextafter(1, 2))
    times = {place: ratio(results, place, ADMISSION, "e2e_mean_s") for place in over}
    where = max(times, key=times.__getitem__)
    yield _at_most(f"mean E2E, {ADMISSION} / {NONE}, beyond 1, at its worst ({where})", times[where], 1.0)


def _at_most(name: str, value: float, limit: float) -> Claim:
    return Claim(name, value, most=limit)


def _figure(results: Results, place: Place, system: str, seed: int, field: str) -> float:
    return float(getattr(results[Point(place.workload, place.load, system, seed)], field))
