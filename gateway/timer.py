"""Time for the synchronous cores: the event loop's clock, timed events, and the loop's lag."""

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

asyncio's and uvloop's timers use the same clock. uvloop's `time()` itself is only updated once an iteration.
"""


def at_loop_time(when_s: float, event: Event) -> None:
    """Schedule an event on the running event loop (an `At`)."""
    loop = asyncio.get_running_loop()
    loop.call_at(when_s, lambda: event(loop_time_s()))


LAG_CHECK_S = 0.05
"""The period of the timer that measures the lag."""

LEAST_LAG_S = 0.25
"""A smaller lag is ignored: a busy loop is always late by some hundredths of a second."""

LATE_SHARE = 0.25
"""An engine is not blamed for a silence if the loop was late for more than this share of it."""

KEPT_S = 120.0
"""How long lags are remembered: longer than any silence that is judged."""


class LoopLag:
    """Measures when the gateway's event loop was late, by a timer with known due times.

    A late loop misses bytes that engines have sent, so their silence in that time is not their fault.
    """

    def __init__(self) -> None:
        self._lags: deque[tuple[float, float]] = deque()  # (when the loop went on, by how many seconds it was late)
        self.due_s = inf
        """When the timer is due: the loop is late while this is past."""
        self.went_on_s = -inf
        """When the latest lag was over."""
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
        """The timer has run, and is due next at `due_s`. Returns its lag in seconds."""
        lag_s, self.due_s = max(0.0, now_s - self.due_s), due_s
        if lag_s >= LEAST_LAG_S:
            self._lags.append((now_s, lag_s))
            self.went_on_s = now_s
        while self._lags and self._lags[0][0] < now_s - KEPT_S:
            self._lags.popleft()
        return lag_s

    def since(self, since_s: float, now_s: float) -> float:
        """The seconds for which the loop was late between two times, with a lag that is not over yet."""
        late_s = 0.0
        for went_on_s, lag_s in reversed(self._lags):
            if went_on_s <= since_s:
                break
            late_s += min(lag_s, went_on_s - since_s)
        unseen_s = now_s - max(since_s, self.due_s)
        return late_s + (unseen_s if unseen_s >= LEAST_LAG_S else 0.0)

    def hides(self, since_s: float, now_s: float) -> bool:
        """Whether the loop was late for so much of this time that it may have missed an engine's bytes."""
        return self.since(since_s, now_s) > LATE_SHARE * (now_s - since_s)
