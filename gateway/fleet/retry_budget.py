"""The retry budget: retries may be a share of a model's active calls, so that sick engines are not asked ever more."""

from __future__ import annotations

from collections import Counter

ACTIVE_SHARE = 0.2
LEAST_RETRIES = 3
"""Envoy's defaults. Envoy keeps a budget for each cluster, which is a model here."""


class RetryBudgets:
    """Counts each model's active calls, and those of its calls that are on a charged retry."""

    def __init__(self) -> None:
        self._active: Counter[str] = Counter()
        self._retrying: Counter[str] = Counter()

    def begin(self, model: str) -> None:
        """A call was placed."""
        self._active[model] += 1

    def end(self, model: str) -> None:
        """A call left its engine."""
        self._active[model] -= 1

    def take(self, model: str) -> bool:
        """Ask for a retry of a call that has just left its engine; False if the budget is used up.

        A retry that was granted is ended by `give_back`.
        """
        if self._retrying[model] >= max(LEAST_RETRIES, ACTIVE_SHARE * (self._active[model] + 1)):
            return False
        self._retrying[model] += 1
        return True

    def give_back(self, model: str) -> None:
        """A retry has ended."""
        assert self._retrying[model] > 0
        self._retrying[model] -= 1

    def check(self, active_calls: int) -> None:
        """Assert the invariants for a fleet with this many calls on its engines; for tests."""
        assert self._active.total() == active_calls
        assert all(count >= 0 for count in (*self._active.values(), *self._retrying.values()))
