"""How fast an engine is: observed over predicted times, relative to the same ratio of its fleet.

A profile that is wrong by the same factor for all engines changes no comparison, so only the difference to the fleet
counts. An engine without observations is taken to be as fast as the fastest known one, so that it gets calls and is
observed. If it were taken to be average, it would get no calls beside a faster engine.
"""

from __future__ import annotations

from math import exp, inf
from statistics import median

MEMORY_S = 20.0
"""Time constant of the exponential decay: a slow engine is noticed within seconds and tried again after a minute."""

PRIOR_S = 1.0
"""The assumed pace weighs as much as this many seconds of observations, so that one short call changes little."""

MOST = 8.0
"""The largest correction. An engine that is slower still is broken, and its health shows that."""

TRUSTED = 1.5
"""Ratios within this factor are not corrected: load that the cost model does not know causes as much. With every
correction applied, mean E2E on hot prefixes was up to a quarter longer.
"""


class Ratio:
    """Observed over predicted seconds, with exponential decay.

    The ratio is the sum of the observed seconds over the sum of the predicted seconds, not a mean of ratios: long times
    count more than short ones, which are noisier.
    """

    __slots__ = ("_at_s", "_observed_s", "_predicted_s")

    def __init__(self) -> None:
        self._observed_s = 0.0
        self._predicted_s = 0.0
        self._at_s = 0.0

    def observe(self, observed_s: float, predicted_s: float, now_s: float) -> None:
        kept = exp((self._at_s - now_s) / MEMORY_S) if self._predicted_s else 0.0
        self._observed_s = self._observed_s * kept + observed_s
        self._predicted_s = self._predicted_s * kept + predicted_s
        self._at_s = now_s

    def at(self, now_s: float, prior: float) -> float:
        """The ratio, with `prior` as `PRIOR_S` seconds of observations. Without new observations, it nears `prior`."""
        kept = exp((self._at_s - now_s) / MEMORY_S) if self._predicted_s else 0.0
        return (PRIOR_S * prior + self._observed_s * kept) / (PRIOR_S + self._predicted_s * kept)

    def known(self, now_s: float) -> float | None:
        """The ratio without a prior; None if the predicted seconds, after decay, sum to less than `PRIOR_S`."""
        if self._predicted_s * exp((self._at_s - now_s) / MEMORY_S) < PRIOR_S:
            return None
        return self._observed_s / self._predicted_s


class FleetPace:
    """The median and the least of a fleet's ratios.

    A mean weighted by calls would follow the engines with most calls, so a fast engine would be compared with itself.
    """

    def __init__(self) -> None:
        self.ratios: list[Ratio] = []
        self._at_s = -inf
        self._known = (0.0, 0.0)

    def known(self, now_s: float) -> tuple[float, float]:
        """(median ratio, least ratio); zeros if no engine's ratio is known."""
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
        """How many times slower the engine is than the median: 1 within `TRUSTED`, else from 1 / `MOST` to `MOST`."""
        usual, fastest = self._fleet.known(now_s)
        if usual == 0.0:
            return 1.0
        ratio = self.at(now_s, fastest) / usual
        return 1.0 if 1 / TRUSTED <= ratio <= TRUSTED else min(MOST, max(1 / MOST, ratio))

    def leave(self) -> None:
        """The engine has left the fleet."""
        self._fleet.ratios.remove(self)
