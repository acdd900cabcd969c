"""How fast an engine really is: its observed times, over the times that its cost model predicts."""

from __future__ import annotations

from math import exp

MEMORY_S = 20.0
"""Observations are forgotten over about so long. A slow engine is seen within seconds and tried again in a minute."""

PRIOR_S = 1.0
"""The cost model counts as so many seconds of observations. A single short call does not change it much."""

MOST = 8.0
"""The largest correction. Beyond it an engine is not slow but broken, which its health shows."""

TRUSTED = 1.5
"""Within this factor the cost model is taken as right. Load that it does not know explains as much: with every
correction applied, mean E2E on hot prefixes was up to a quarter longer.
"""


class Pace:
    """A correction factor: 2 means twice as slow as predicted. It returns to 1 if nothing is observed.

    It is the ratio of two sums, so that long times count more than short ones, in which noise is a larger part.
    """

    __slots__ = ("_at_s", "_observed_s", "_predicted_s")

    def __init__(self) -> None:
        self._observed_s = 0.0
        self._predicted_s = 0.0
        self._at_s = 0.0

    def __repr__(self) -> str:
        return f"Pace({self.factor(self._at_s):.2f})"

    def observe(self, observed_s: float, predicted_s: float, now_s: float) -> None:
        """Something took `observed_s` that was predicted to take `predicted_s`."""
        kept = exp((self._at_s - now_s) / MEMORY_S) if self._predicted_s else 0.0
        self._observed_s = self._observed_s * kept + observed_s
        self._predicted_s = self._predicted_s * kept + predicted_s
        self._at_s = now_s

    def factor(self, now_s: float) -> float:
        """What predicted times have to be multiplied with: 1, or from `TRUSTED` to `MOST`, or the inverse of these."""
        if not self._predicted_s:
            return 1.0
        kept = exp((self._at_s - now_s) / MEMORY_S)
        ratio = (PRIOR_S + self._observed_s * kept) / (PRIOR_S + self._predicted_s * kept)
        return 1.0 if 1 / TRUSTED <= ratio <= TRUSTED else min(MOST, max(1 / MOST, ratio))
