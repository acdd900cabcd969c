"""Time for the synchronous cores: the event loop's clock, and events scheduled by it or by a simulator's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

Event = Callable[[float], None]
"""An event. It is called with the time at which it happens."""

At = Callable[[float, Event], object]
"""Schedules an event at a time, in seconds. A time that has passed means now."""


loop_time_s: Final = monotonic
"""The event loop's clock, in seconds: the `now_s` that the gateway gives its cores.

asyncio's and uvloop's timers count by this clock. uvloop's own `time` is that of the latest turn of the loop.
"""


def at_loop_time(when_s: float, event: Event) -> None:
    """Schedule an event by the running event loop's clock."""
    loop = asyncio.get_running_loop()
    loop.call_at(when_s, lambda: event(loop_time_s()))
