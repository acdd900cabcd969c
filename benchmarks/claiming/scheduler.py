"""What is claimed of the engines' scheduler on AccelGen's mixed prompts, against FCFS with chunked prefill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.mixed_prompts import LONG_SHARE, Mix
from benchmarks.schedulers.sweep import Point, Task, means
from benchmarks.schedulers.systems import OURS
from plait.lab.simulation.claim import Claim

FCFS: Final = ("fcfs_512", "fcfs_2048")
RATES: Final = (0.3, 0.6)
QUICK_RATES: Final = RATES[-1:]
LEAST_GOODPUT: Final = 1.43
"""AccelGen's over the best of its baselines."""
LEAST_THROUGHPUT: Final = 0.95


def tasks(*, quick: bool) -> list[Task]:
    """Ours and FCFS at each rate."""
    calls, seeds = (100, (0,)) if quick else (300, (0, 1, 2))
    return [
        (Point("rate", "range", LONG_SHARE, rate, system), Mix(calls, rate, seed, LONG_SHARE, "range"))
        for rate in (QUICK_RATES if quick else RATES)
        for system in (OURS, *FCFS)
        for seed in seeds
    ]


def claims(found: Mapping[Task, Mapping[str, float]]) -> Iterator[Claim]:
    """Goodput and throughput over the better FCFS budget's. A budget with which no call is good counts as with one."""
    by_load = {(point.rate_per_s, point.system): figures for point, figures in means(found).items()}
    for rate in dict.fromkeys(rate for rate, _ in by_load):
        for name, field, least in (
            ("goodput", "goodput_calls_s", LEAST_GOODPUT),
            ("completed calls/s", "throughput_calls_s", LEAST_THROUGHPUT),
        ):
            best = max(1 / by_load[rate, OURS]["window_s"], *(by_load[rate, system][field] for system in FCFS))
            yield Claim(f"{name}, {OURS} / the better FCFS, {rate:g}/s", by_load[rate, OURS][field] / best, least=least)
