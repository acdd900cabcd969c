"""Time for the synchronous cores in the gateway: the event loop's clock, events by it, and how late it is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Final

from plait.gateway.timed_events import Event

loop_time_s: Final = monotonic
"""The event loop's clock, in seconds: the `now_s` that the gateway gives its cores.

asyncio's and uvloop's timers count by this clock. uvloop's own `time` is that of the latest turn of the loop.
"""


def at_loop_time(when_s: float, event: Event) -> None:
    """Schedule an event by the running event loop's clock."""
    loop = asyncio.get_running_loop()
    loop.call_at(when_s, lambda: event(loop_time_s()))


LAG_CHECK_S = 0.05
"""Between two looks at how late the loop is."""

LEAST_LAG_S = 0.25
"""Less does not count: silences are judged in seconds, and a busy loop is always late by some hundredths of one."""

LATE_SHARE = 0.25
"""A wait for so large a part of which the loop was late says nothing of an engine."""

KEPT_S = 120.0
"""Longer than any silence that is judged."""


class LoopLag:
    """When the gateway's own event loop was late, by a timer that runs at known times.

    What it missed meanwhile is no engine's fault.
    """

    def __init__(self) -> None:
        self._lags: deque[tuple[float, float]] = deque()  # (when it went on, by how much it was late)
        self._due_s = inf
        self._timer: asyncio.TimerHandle | None = None

    def measure(self, observe: Callable[[float], object]) -> None:
        """Run the timer of the running loop until `stop`. `observe` gets each lag in seconds."""
        now_s = loop_time_s()
        self._timer = asyncio.get_running_loop().call_later(LAG_CHECK_S, self.measure, observe)
        observe(self.ran(now_s, now_s + LAG_CHECK_S))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def ran(self, now_s: float, due_s: float) -> float:
        """The timer runs, and runs again when it is `due_s`; returns by how much it was late, in seconds."""
        lag_s, self._due_s = max(0.0, now_s - self._due_s), due_s
        if lag_s >= LEAST_LAG_S:
            self._lags.append((now_s, lag_s))
        while self._lags and self._lags[0][0] < now_s - KEPT_S:
            self._lags.popleft()
        return lag_s

    def since(self, since_s: float, now_s: float) -> float:
        """For how long the loop was late between two times, with the lag that may not be over yet."""
        late_s = 0.0
        for went_on_s, lag_s in reversed(self._lags):
            if went_on_s <= since_s:
                break
            late_s += min(lag_s, went_on_s - since_s)
        unseen_s = now_s - max(since_s, self._due_s)
        return late_s + (unseen_s if unseen_s >= LEAST_LAG_S else 0.0)

    def hides(self, since_s: float, now_s: float) -> bool:
        """Whether the loop was late for so much of this time that it may have missed what an engine sent."""
        return self.since(since_s, now_s) > LATE_SHARE * (now_s - since_s)
