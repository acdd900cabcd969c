"""The form of events that the synchronous cores schedule, by the event loop's clock or by a simulator's."""

from __future__ import annotations

from collections.abc import Callable

Event = Callable[[float], None]
"""An event. It is called with the time at which it happens."""

At = Callable[[float, Event], object]
"""Schedules an event at a time, in seconds. A time that has passed means now."""
