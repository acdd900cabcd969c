"""What the CPU times amount to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile (nearest rank), in seconds."""

    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Spread:
        """Of at least one time."""
        ordered = sorted(times_s)
        return cls(median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))])
