"""The retry budget: retries may be a share of the active calls, so that a sick fleet is not asked ever more."""

from __future__ import annotations

ACTIVE_SHARE = 0.2
LEAST_RETRIES = 3
"""Envoy's defaults."""


class RetryBudget:
    """Counts the calls that are on a charged retry. Each `take` that was granted is ended by one `give_back`."""

    def __init__(self) -> None:
        self.retrying = 0

    def take(self, active_calls: int) -> bool:
        """Ask for a retry while `active_calls` are in the gateway; False if the budget is used up."""
        if self.retrying >= max(LEAST_RETRIES, ACTIVE_SHARE * active_calls):
            return False
        self.retrying += 1
        return True

    def give_back(self) -> None:
        """A retry has ended."""
        assert self.retrying > 0
        self.retrying -= 1
