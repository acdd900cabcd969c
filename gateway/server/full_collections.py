"""Schedules full garbage collections, which stop the event loop for as long as they look at every object."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from typing import Final, Protocol

SHARE: Final = 1 / 200
"""The most time spent in full collections: half of the requests that a 99th percentile leaves out."""
LEAST_PAUSE_S: Final = 5.0
"""The period of looks at the memory. A full collection without sessions takes 25 ms, which is `SHARE` of this."""
MOST_PAUSE_S: Final = 600.0
"""The period of full collections. A call leaves less than one object that only a full collection finds."""
GROWTH_BYTES: Final = 256 * 2**20
"""A new peak of memory by this much may be garbage, so it triggers a collection: a quarter of 1 GiB of bodies."""
YOUNG: Final = (700, 10)
"""CPython's thresholds for the young generations, whose collections take less than a millisecond."""
NEVER: Final = 2**31 - 1
"""Turns automatic full collections off. CPython would start one whenever the old objects have grown by a quarter."""


_trim: Final[Callable[[int], int] | None] = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Returns free memory to the system. Otherwise glibc keeps the 20 MB that loading a tokenizer took."""


class Clock(Protocol):
    """An event loop."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None], /) -> object: ...


def peak_bytes() -> int:
    """The peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class FullCollections:
    """Collects at a new peak of memory, and every ten minutes; less often if collections take long.

    10,000 sessions are 200,000 objects, for which a collection takes 0.25 s. Nearly all objects of a call are freed by
    reference counting.
    """

    def __init__(self, clock: Clock, peak: Callable[[], int] = peak_bytes) -> None:
        self._clock = clock
        self._peak = peak
        self._collected_s = 0.0  # when the last collection ended
        self._peak_bytes = 0  # the peak at that time

    def start(self) -> None:
        """Take over the process's garbage collector. Freezes present objects, so that no collection looks at them."""
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
