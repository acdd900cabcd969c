"""A timer that every read may move: most moves do not touch the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

CLOCK_STEP_S = 0.001  # the step of uvloop's clock and timers: a timer can fire this early


class Deadline:
    """Calls `on_expiry` when the time set by the last `move` has passed.

    A move to a later time only writes a number. The timer reads it on firing, and starts again if it fired early.
    """

    __slots__ = ("_armed_at_s", "_at_s", "_loop", "_on_expiry", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expiry: Callable[[], None]) -> None:
        self._loop = loop
        self._on_expiry = on_expiry
        self._at_s = inf
        self._armed_at_s = inf
        self._timer: asyncio.TimerHandle | None = None

    def move(self, delay_s: float) -> None:
        """Replaces the deadline: it is `delay_s` from now."""
        self._at_s = self._loop.time() + delay_s
        if self._at_s < self._armed_at_s:
            self._arm()

    def cancel(self) -> None:
        """Stops the timer until the next `move`."""
        self._at_s = self._armed_at_s = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_at_s = self._at_s
        self._timer = self._loop.call_at(self._at_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._armed_at_s = inf
        if self._at_s - self._loop.time() > CLOCK_STEP_S:
            self._arm()
        else:
            self._on_expiry()
