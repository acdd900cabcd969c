"""What the CPU times amount to, and what they are to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.chaining.measurement import CALLS_A_SESSION, HELD_SESSIONS, Hop
from plait.lab.simulation.claim import Claim


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


HOP_TARGET = Spread(0.0003, 0.001)
PLAIN_RATIO_TARGET = 1.05


@dataclass(slots=True)
class Times:
    """CPU seconds: of plain calls with none and with many held beside them, and of hops beside those many.

    `hops` are by the criteria of the gets.
    """

    plain_s: list[float] = field(default_factory=list)
    plain_beside_s: list[float] = field(default_factory=list)
    hops: dict[str, list[Hop]] = field(default_factory=dict)

    @property
    def plain_ratio(self) -> float:
        """How many times a plain call costs what it costs without held calls: medians."""
        return median(self.plain_beside_s) / median(self.plain_s)

    def spreads(self) -> dict[str, Spread]:
        """By what is measured."""
        plain_s = median(self.plain_beside_s)
        found = {"a plain call, none held": Spread.of(self.plain_s), "a plain call": Spread.of(self.plain_beside_s)}
        for criteria, hops in self.hops.items():
            found[f"{criteria}: to hold a call"] = Spread.of([hop.hold_s for hop in hops])
            found[f"{criteria}: a hop"] = Spread.of([hop.wake_s for hop in hops])
            found[f"{criteria}: a hop beyond a plain call"] = Spread.of([hop.wake_s - plain_s for hop in hops])
        return found

    def claims(self) -> Iterator[Claim]:
        """Fixed targets."""
        for name, spread in self.spreads().items():
            if ": a hop" not in name:
                continue
            for figure, found_s, target_s in (
                ("median", spread.p50_s, HOP_TARGET.p50_s),
                ("p99", spread.p99_s, HOP_TARGET.p99_s),
            ):
                yield Claim(f"{name}, {figure} (us)", found_s * 1e6, most=target_s * 1e6)
        yield Claim(
            f"CPU of a plain call, {HELD_SESSIONS * CALLS_A_SESSION:,} calls held / none, medians",
            self.plain_ratio,
            most=PLAIN_RATIO_TARGET,
        )

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "times": {name: asdict(spread) for name, spread in self.spreads().items()},
            "samples": {
                "plain": len(self.plain_s),
                "plain_beside": len(self.plain_beside_s),
                "hops": {criteria: len(hops) for criteria, hops in self.hops.items()},
            },
            "plain_ratio": self.plain_ratio,
        }
