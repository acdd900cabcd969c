"""The tenants that use a model at present, and which part of it each of them may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

ACTIVE_S: Final = 60.0
"""So long after its last call a tenant counts."""


class ActiveTenants:
    """The tenants that have sent a call within `ACTIVE_S`. `weight` returns a tenant's weight."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._latest: dict[str, tuple[float, float]] = {}  # the last call's time and the tenant's weight, oldest first
        self._weights = 0.0

    def came(self, tenant: str, now_s: float) -> None:
        """A call of the tenant has come, or was sent on."""
        before = self._latest.pop(tenant, None)
        weight = self._weight(tenant)
        self._weights += weight - (0.0 if before is None else before[1])
        self._latest[tenant] = now_s, weight

    def are_several(self, now_s: float) -> bool:
        """Whether more than one tenant counts."""
        self._forget(now_s)
        return len(self._latest) > 1

    def share(self, tenant: str, now_s: float) -> float:
        """The part that the tenant may take while all that count want some."""
        self._forget(now_s)
        mine = self._latest.get(tenant)
        weight = self._weight(tenant) if mine is None else mine[1]
        return weight / (self._weights if mine is not None else self._weights + weight)

    def _forget(self, now_s: float) -> None:
        while self._latest:
            tenant, (latest_s, weight) = next(iter(self._latest.items()))
            if now_s - latest_s <= ACTIVE_S:
                return
            del self._latest[tenant]
            self._weights = self._weights - weight if self._latest else 0.0  # rounding ends with the tenants
