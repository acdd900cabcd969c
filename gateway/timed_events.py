"""The types of events that the synchronous cores schedule, on the event loop's clock or a simulator's."""

from __future__ import annotations

from collections.abc import Callable

Event = Callable[[float], None]
"""An event: a function that is called with the time at which it happens, in seconds."""

At = Callable[[float, Event], object]
"""Schedules an event at a time, in seconds. An event whose time has passed happens as soon as possible."""
