"""How fast an engine is: observed times over those that its cost model predicts, against what is usual in its fleet.

A profile that is wrong for every engine alike changes no comparison, so only the difference to the fleet counts. An
engine of which nothing is known is taken to be as fast as the fastest known one. So it gets calls, and soon its pace is
known. Taken to be like the others, it would get none beside an engine that is faster than they are.
"""

from __future__ import annotations

from math import exp, inf
from statistics import median

MEMORY_S = 20.0
"""Observations are forgotten over about so long. A slow engine is seen within seconds and tried again in a minute."""

PRIOR_S = 1.0
"""The pace that an engine is taken for counts as so many seconds of observations: one short call changes little."""

MOST = 8.0
"""The largest correction. Beyond it an engine is not slow but broken, which its health shows."""

TRUSTED = 1.5
"""Within this factor an engine is taken to be like the others. Load that the cost model does not know explains as much:
with every correction applied, mean E2E on hot prefixes was up to a quarter longer.
"""


class Ratio:
    """The observed over the predicted seconds.

    It is the ratio of two sums, so that long times count more than short ones, in which noise is a larger part.
    """

    __slots__ = ("_at_s", "_observed_s", "_predicted_s")

    def __init__(self) -> None:
        self._observed_s = 0.0
        self._predicted_s = 0.0
        self._at_s = 0.0

    def observe(self, observed_s: float, predicted_s: float, now_s: float) -> None:
        """Something took `observed_s` that was predicted to take `predicted_s`."""
        kept = exp((self._at_s - now_s) / MEMORY_S) if self._predicted_s else 0.0
        self._observed_s = self._observed_s * kept + observed_s
        self._predicted_s = self._predicted_s * kept + predicted_s
        self._at_s = now_s

    def at(self, now_s: float, prior: float) -> float:
        """The ratio; `prior` counts as `PRIOR_S` seconds of it, to which it goes back if nothing is observed."""
        kept = exp((self._at_s - now_s) / MEMORY_S) if self._predicted_s else 0.0
        return (PRIOR_S * prior + self._observed_s * kept) / (PRIOR_S + self._predicted_s * kept)

    def known(self, now_s: float) -> float | None:
        """The ratio; None if less than `PRIOR_S` was predicted, or that is forgotten."""
        if self._predicted_s * exp((self._at_s - now_s) / MEMORY_S) < PRIOR_S:
            return None
        return self._observed_s / self._predicted_s


class FleetPace:
    """What is usual in a fleet, and the fastest: the median and the least of its engines' ratios.

    A mean would be that of the engines with most calls, so a fast engine would soon be the measure of itself.
    """

    def __init__(self) -> None:
        self.ratios: list[Ratio] = []
        self._at_s = -inf
        self._known = (0.0, 0.0)

    def known(self, now_s: float) -> tuple[float, float]:
        """The usual ratio and the least; zeros if nothing is known."""
        if self._at_s != now_s:
            known = [ratio for one in self.ratios if (ratio := one.known(now_s)) is not None]
            self._at_s, self._known = now_s, (median(known), min(known)) if known else (0.0, 0.0)
        return self._known


class EnginePace(Ratio):
    """One engine's ratio in its `fleet`."""

    __slots__ = ("_fleet",)

    def __init__(self, fleet: FleetPace | None = None) -> None:
        super().__init__()
        self._fleet = FleetPace() if fleet is None else fleet
        self._fleet.ratios.append(self)

    def slowness(self, now_s: float) -> float:
        """How many times slower the engine is than is usual: 1, or at least `TRUSTED`, or the inverse of that."""
        usual, fastest = self._fleet.known(now_s)
        if usual == 0.0:
            return 1.0
        ratio = self.at(now_s, fastest) / usual
        return 1.0 if 1 / TRUSTED <= ratio <= TRUSTED else min(MOST, max(1 / MOST, ratio))

    def leave(self) -> None:
        """The engine is in the fleet no more."""
        self._fleet.ratios.remove(self)
