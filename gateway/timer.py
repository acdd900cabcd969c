"""Time for the synchronous cores: the event loop's clock, and how something happens later by it or by a simulator's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Event = Callable[[float], None]
"""What happens at a time; it is given the time."""

At = Callable[[float, Event], object]
"""Has an event happen at a time, in seconds; a time that has passed is now."""


def loop_time_s() -> float:
    """The running event loop's clock, in seconds: the `now_s` that the gateway gives its cores."""
    return asyncio.get_running_loop().time()


def at_loop_time(when_s: float, event: Event) -> None:
    """By the clock of the running event loop."""
    loop = asyncio.get_running_loop()
    loop.call_at(when_s, lambda: event(loop.time()))
