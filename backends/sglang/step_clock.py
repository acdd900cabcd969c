"""The time that decisions are made by: one rank's, sent to all of them with a step's requests.

Under tensor parallelism every rank runs a scheduler of its own, and all have to decide alike. So no rank plans by its
clock: the leading one says what time it is and how long iterations took, and all go by what it said. See
docs/design/clocks.md.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    """Sent at the beginning of a step: its time, and how long the iterations took that ended since the last tick."""

    now_s: float
    durations_s: tuple[float, ...]


class StepClock:
    """On every rank `now_s` and what `ticked` returns; the rest only on the leading one.

    The time stands still while the engine is idle, when no tick is sent: it would change nothing but the metrics.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now_s = 0.0
        self._clock = clock
        self._said_s = 0.0
        self._looked_s = clock()
        self._durations_s: deque[float] = deque()

    @property
    def present_s(self) -> float:
        """What a tick would say now."""
        return self._said_s + self._clock() - self._looked_s

    def measured(self, duration_s: float) -> None:
        """An iteration is over, in the order in which all ranks count them."""
        self._durations_s.append(duration_s)

    def tick(self, *, idle: bool) -> Tick | None:
        """What to send with the next step; it may get lost on the way, as long as it does so on all ranks."""
        if idle:
            self._looked_s = self._clock()
            return None
        self._said_s, self._looked_s = self.present_s, self._clock()
        return Tick(self._said_s, tuple(self._durations_s))

    def ticked(self, tick: Tick) -> tuple[float, ...]:
        """A tick has arrived: the durations that it brought."""
        self.now_s = tick.now_s
        for _ in tick.durations_s[: len(self._durations_s)]:
            self._durations_s.popleft()
        return tick.durations_s
