"""The arrival rate of each tenant at one engine."""

from __future__ import annotations

from math import exp
from typing import Final

from plait.policy.admission.fair_shares import ACTIVE_S, LATELY_S

LEAST_S: Final = 1.0
"""The shortest observed time: a rate over less would say nothing."""


class ArrivalRates:
    """Calls a second by tenant, with exponential decay over `LATELY_S`."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[str, tuple[float, float, float]] = {}  # by tenant: first time, latest time, decayed calls

    def came(self, tenant: str, now_s: float) -> None:
        first_s, latest_s, calls = self._calls.get(tenant, (now_s, now_s, 0.0))
        self._calls[tenant] = first_s, now_s, calls * exp((latest_s - now_s) / LATELY_S) + 1.0

    def per_s(self, now_s: float) -> dict[str, float]:
        """The rate of each tenant with a call within `ACTIVE_S`. Forgets the others."""
        self._calls = {tenant: one for tenant, one in self._calls.items() if now_s - one[1] <= ACTIVE_S}
        return {
            tenant: calls * exp((latest_s - now_s) / LATELY_S) / _counted_s(now_s - first_s)
            for tenant, (first_s, latest_s, calls) in self._calls.items()
        }


def _counted_s(elapsed_s: float) -> float:
    """The sum of the decayed weights of the elapsed seconds."""
    return max(LEAST_S, LATELY_S * (1.0 - exp(-elapsed_s / LATELY_S)))
