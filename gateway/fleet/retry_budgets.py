"""Retries of calls that engines have failed: a share of what is on the engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

ACTIVE_SHARE = 0.2
LEAST_RETRIES = 3
"""Envoy's defaults. Envoy keeps a retry budget for each cluster, which is a model here."""


class RetryBudgets:
    """Retries may be a share of a model's `active` calls, so that sick engines are not asked ever more."""

    def __init__(self, active: Mapping[str, int]) -> None:
        self._active = active
        self._retrying: Counter[str] = Counter()

    def take(self, model: str) -> bool:
        """Ask for a retry of a call that has just left its engine; False if the budget is used up.

        A retry that was granted is ended by `give_back`.
        """
        if self._retrying[model] >= max(LEAST_RETRIES, ACTIVE_SHARE * (self._active.get(model, 0) + 1)):
            return False
        self._retrying[model] += 1
        return True

    def give_back(self, model: str) -> None:
        """A retry has ended."""
        assert self._retrying[model] > 0
        self._retrying[model] -= 1

    def check(self, active_calls: int) -> None:
        """Assert the invariants for a fleet with this many calls on its engines; for tests."""
        assert sum(self._active.values()) == active_calls
        assert all(count >= 0 for count in (*self._active.values(), *self._retrying.values()))
