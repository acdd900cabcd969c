"""What the CPU times amount to, and what they are to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.chaining.measurement import CALLS_A_SESSION, HELD_SESSIONS, Chained
from plait.gateway.simulation.comparison_report import Claim

ADDED_P99_TARGET_S = 0.001
PLAIN_RATIO_TARGET = 1.05


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


@dataclass(slots=True)
class Times:
    """CPU seconds: of plain calls with none and with many held beside them, and of chained calls beside those many."""

    plain_s: list[float] = field(default_factory=list)
    plain_beside_s: list[float] = field(default_factory=list)
    chained: list[Chained] = field(default_factory=list)

    @property
    def added_s(self) -> list[float]:
        """What each chained call takes beyond the median plain one, which tokenizes as long a prompt."""
        plain_s = median(self.plain_beside_s)
        return [call.total_s - plain_s for call in self.chained]

    @property
    def plain_ratio(self) -> float:
        """How many times a plain call costs what it costs without held calls: medians."""
        return median(self.plain_beside_s) / median(self.plain_s)

    def spreads(self) -> dict[str, Spread]:
        """By what is measured."""
        held = f"{HELD_SESSIONS * CALLS_A_SESSION:,} calls held"
        return {
            "a plain call, none held": Spread.of(self.plain_s),
            f"a plain call, {held}": Spread.of(self.plain_beside_s),
            f"a chained call, {held}: to hold it": Spread.of([call.hold_s for call in self.chained]),
            f"a chained call, {held}: to wake and settle it": Spread.of([call.wake_s for call in self.chained]),
            f"a chained call, {held}: beyond a plain one": Spread.of(self.added_s),
        }

    def claims(self) -> Iterator[Claim]:
        """Fixed targets."""
        added_s, ratio = Spread.of(self.added_s).p99_s, self.plain_ratio
        yield Claim(
            "CPU that a chained call takes beyond a plain one, p99 (us)",
            added_s * 1e6,
            f"< {ADDED_P99_TARGET_S * 1e6:g}",
            added_s < ADDED_P99_TARGET_S,
        )
        yield Claim(
            f"CPU of a plain call, {HELD_SESSIONS * CALLS_A_SESSION:,} calls held / none, medians",
            ratio,
            f"<= {PLAIN_RATIO_TARGET:g}",
            ratio <= PLAIN_RATIO_TARGET,
        )

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "times": {name: asdict(spread) for name, spread in self.spreads().items()},
            "samples": {
                "plain": len(self.plain_s),
                "plain_beside": len(self.plain_beside_s),
                "chained": len(self.chained),
            },
            "plain_ratio": self.plain_ratio,
            "claims": [asdict(claim) for claim in self.claims()],
        }
