"""Python's garbage collector, which stops the gateway while it looks at every object, kept to rare occasions."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from typing import Final, Protocol

SHARE: Final = 1 / 200
"""Of the time for full collections: half of the requests that a 99th percentile leaves out."""
LEAST_PAUSE_S: Final = 5.0
"""Between looks at the memory. A full collection without sessions needs 25 ms, which is `SHARE` of this."""
MOST_PAUSE_S: Final = 600.0
"""Between full collections. Calls leave less than one object each that only they find."""
GROWTH_BYTES: Final = 256 * 2**20
"""So much more memory than ever before may be garbage, so a collection comes early: a quarter of 1 GiB of bodies."""
YOUNG: Final = (700, 10)
"""CPython's thresholds for objects that were just made. Such collections take less than a millisecond."""
NEVER: Final = 2**31 - 1
"""The threshold for automatic full collections. CPython begins one whenever a quarter more objects have been kept."""


_trim: Final[Callable[[int], int] | None] = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Gives the system what is free: glibc alone keeps the 20 MB that reading a tokenizer's files took."""


class Clock(Protocol):
    """An event loop."""

    def time(self) -> float:
        """Seconds."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> object:
        """Call it after so many seconds."""


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class FullCollections:
    """Collects at times of its own: when memory has grown to a new peak, and every ten minutes.

    10,000 sessions are 200,000 objects, for which a collection takes 0.25 s. What a call leaves is freed without one,
    but for few objects. The longer a collection takes, the longer is the pause to the next one.
    """

    def __init__(self, clock: Clock, peak: Callable[[], int] = peak_bytes) -> None:
        self._clock = clock
        self._peak = peak
        self._collected_s = 0.0  # when the latest collection ended
        self._peak_bytes = 0  # by then

    def start(self) -> None:
        """Begin; this is for the whole process. What is loaded by now stays, so no collection looks at it again."""
        self._collect()
        if _trim is not None:
            _trim(0)
        gc.freeze()
        gc.set_threshold(*YOUNG, NEVER)
        self._clock.call_later(LEAST_PAUSE_S, self._look)

    def _look(self) -> None:
        is_due = self._clock.time() >= self._collected_s + MOST_PAUSE_S
        took_s = self._collect() if is_due or self._peak() >= self._peak_bytes + GROWTH_BYTES else 0.0
        self._clock.call_later(max(LEAST_PAUSE_S, took_s / SHARE), self._look)

    def _collect(self) -> float:
        began_s = self._clock.time()
        gc.collect()
        self._collected_s, self._peak_bytes = self._clock.time(), self._peak()
        return self._collected_s - began_s
