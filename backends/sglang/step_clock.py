"""The clock that plans use: the leading rank's time, sent to all ranks with a step's requests.

Under tensor parallelism every rank runs a scheduler, and all must make the same plan. So the leading rank sends its
time and the iterations' durations, and no rank plans by its own clock. See docs/design/clocks.md.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    """A step's time, and the durations of the iterations since the last tick. Sent at the beginning of the step."""

    now_s: float
    durations_s: tuple[float, ...]


class StepClock:
    """All ranks plan by `now_s` and the result of `ticked`. Only the leading rank's ticks are sent.

    While the engine is idle, no tick is sent and the time does not advance. That affects only the metrics.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now_s = 0.0
        self._step_s = 0.0
        self._clock = clock
        self._said_s = 0.0  # the last tick's time
        self._looked_s = clock()  # this rank's own clock then
        self._durations_s: deque[float] = deque()

    @property
    def present_s(self) -> float:
        """The time that a tick would have now."""
        return self._said_s + self._clock() - self._looked_s

    @property
    def received_s(self) -> float:
        """When this step's requests reached the engine, on average: SGLang reads requests between steps only."""
        return self.now_s - self._step_s / 2

    def measured(self, duration_s: float) -> None:
        """An iteration is over. All ranks see iterations in the same order."""
        self._durations_s.append(duration_s)

    def tick(self, *, idle: bool) -> Tick | None:
        """The tick to send with the next step; None when idle. If a tick is lost, it is lost on all ranks."""
        if idle:
            self._looked_s = self._clock()
            return None
        self._said_s, self._looked_s = self.present_s, self._clock()
        return Tick(self._said_s, tuple(self._durations_s))

    def ticked(self, tick: Tick) -> tuple[float, ...]:
        """A tick has arrived; returns its durations."""
        self._step_s, self.now_s = tick.now_s - self.now_s, tick.now_s
        for _ in tick.durations_s[: len(self._durations_s)]:
            self._durations_s.popleft()
        return tick.durations_s

    def rested(self) -> None:
        """A step came without a tick: the engine was idle."""
        self._step_s = 0.0
