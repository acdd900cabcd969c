"""Passive health: an engine that cannot be connected to is set aside, and probed until it answers.

Pure: it takes events and computes the delay of the next probe. The monitor does the probing. An engine starts untried:
it gets no calls until its first probe has found out which models it serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HealthState(StrEnum):
    """Only an engine that is up takes calls."""

    UNTRIED = "untried"
    UP = "up"
    DOWN = "down"


class HealthEvent(StrEnum):
    """The two results of contacting an engine."""

    ANSWERED = "answered"
    UNREACHABLE = "unreachable"


TRANSITIONS: dict[tuple[HealthState, HealthEvent], HealthState] = {
    (HealthState.UNTRIED, HealthEvent.ANSWERED): HealthState.UP,
    (HealthState.UNTRIED, HealthEvent.UNREACHABLE): HealthState.DOWN,
    (HealthState.UP, HealthEvent.ANSWERED): HealthState.UP,
    (HealthState.UP, HealthEvent.UNREACHABLE): HealthState.DOWN,
    (HealthState.DOWN, HealthEvent.ANSWERED): HealthState.UP,
    (HealthState.DOWN, HealthEvent.UNREACHABLE): HealthState.DOWN,
}


@dataclass(slots=True)
class Health:
    """One engine's health. After the first failure the next probe waits `interval_s`.

    Each further failure doubles the wait, up to `max_interval_s`.
    """

    interval_s: float = 1.0
    max_interval_s: float = 30.0
    state: HealthState = HealthState.UNTRIED
    failures: int = 0

    @property
    def probe_after_s(self) -> float:
        """How long to wait before the next probe."""
        doublings = min(30, max(0, self.failures - 1))
        return min(self.max_interval_s, self.interval_s * float(1 << doublings))

    def on(self, event: HealthEvent) -> bool:
        """Apply an event; True if the state changed."""
        before, self.state = self.state, TRANSITIONS[self.state, event]
        self.failures = 0 if event is HealthEvent.ANSWERED else self.failures + 1
        return self.state is not before
