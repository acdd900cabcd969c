"""When an engine stopped getting calls, from what arrived there and what was sent in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BUCKET_S: Final = 0.25
LEAST_SHARE: Final = 0.1
"""An engine is out when it gets less than this part of its fair share."""


@dataclass(frozen=True, slots=True)
class Presence:
    """A load on a fleet of `engines`, until the faulty one is healed. `sent_s` has the times of all calls."""

    began_s: float
    healed_s: float
    engines: int
    sent_s: Sequence[float]

    def out_after_s(self, arrived_s: Sequence[float]) -> float | None:
        """The time from the begin until the engine is out for good, by what arrived there; None: it never was."""
        last = 0
        for bucket in range(int((self.healed_s - self.began_s) / BUCKET_S)):
            least = max(1.0, LEAST_SHARE * self._within(self.sent_s, bucket) / self.engines)
            if self._within(arrived_s, bucket) > least:
                last = bucket + 1
        out_s = last * BUCKET_S
        return out_s if self.began_s + out_s < self.healed_s - 2 * BUCKET_S else None

    def unhurt_after_s(self, hurt_s: Sequence[float]) -> float:
        """The time from the begin until the last call ended that failed or was slow."""
        return max(hurt_s, default=self.began_s) - self.began_s

    def _within(self, times_s: Sequence[float], bucket: int) -> int:
        from_s = self.began_s + bucket * BUCKET_S
        return sum(from_s <= at_s < from_s + BUCKET_S for at_s in times_s)
