"""How many calls of each tenant come to an engine in a second."""

from __future__ import annotations

from math import exp
from typing import Final

from plait.policy.admission.fair_shares import ACTIVE_S, LATELY_S

LEAST_S: Final = 1.0
"""The calls of a shorter time say nothing of a rate: they count as if they had come in so long."""


class ArrivalRates:
    """The calls that have come lately, which are forgotten exponentially over `LATELY_S`."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[str, tuple[float, float, float]] = {}  # by tenant: first and latest time, and calls by then

    def came(self, tenant: str, now_s: float) -> None:
        """A call has come."""
        first_s, latest_s, calls = self._calls.get(tenant, (now_s, now_s, 0.0))
        self._calls[tenant] = first_s, now_s, calls * exp((latest_s - now_s) / LATELY_S) + 1.0

    def per_s(self, now_s: float) -> dict[str, float]:
        """The calls a second of each tenant that has sent one within a minute. The others are forgotten."""
        self._calls = {tenant: one for tenant, one in self._calls.items() if now_s - one[1] <= ACTIVE_S}
        return {
            tenant: calls * exp((latest_s - now_s) / LATELY_S) / _counted_s(now_s - first_s)
            for tenant, (first_s, latest_s, calls) in self._calls.items()
        }


def _counted_s(elapsed_s: float) -> float:
    """How much of the elapsed seconds is not forgotten."""
    return max(LEAST_S, LATELY_S * (1.0 - exp(-elapsed_s / LATELY_S)))
