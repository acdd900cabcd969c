"""A timer for frequent events: every read moves it, and hardly any move touches the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

CLOCK_STEP_S = 0.001  # uvloop's clock and timers step by this, so a timer can fire that much early


class Deadline:
    """Calls `on_expiry` when the time last given to `move` has passed.

    Moving it later only writes a number. The timer reads the number when it fires, and is set again if it is early.
    """

    __slots__ = ("_armed_at_s", "_at_s", "_loop", "_on_expiry", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expiry: Callable[[], None]) -> None:
        self._loop = loop
        self._on_expiry = on_expiry
        self._at_s = inf
        self._armed_at_s = inf
        self._timer: asyncio.TimerHandle | None = None

    def move(self, delay_s: float) -> None:
        """Expires `delay_s` from now instead of at the earlier deadline."""
        self._at_s = self._loop.time() + delay_s
        if self._at_s < self._armed_at_s:
            self._arm()

    def cancel(self) -> None:
        """Does not expire any more, until moved."""
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
