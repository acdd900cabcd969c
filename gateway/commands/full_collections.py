"""Python's garbage collector, which stops the gateway while it looks at every object, kept to a share of the time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final, Protocol

SHARE: Final = 1 / 200
"""Of the time for full collections: half of the requests that a 99th percentile leaves out."""
LEAST_PAUSE_S: Final = 5.0
"""Between full collections. A gateway without sessions needs 25 ms for one, which is `SHARE` of this."""
YOUNG: Final = (700, 10)
"""CPython's thresholds for objects that were just made. Such collections take less than a millisecond."""
NEVER: Final = 2**31 - 1
"""The threshold for automatic full collections. CPython begins one whenever a quarter more objects have been kept."""


class Clock(Protocol):
    """An event loop."""

    def time(self) -> float:
        """Seconds."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> object:
        """Call it after so many seconds."""


class FullCollections:
    """Collects at times of its own. 10,000 sessions are 200,000 objects, for which a collection takes 0.25 s.

    The longer a collection takes, the longer is the pause to the next one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def start(self) -> None:
        """Begin; this is for the whole process. What is loaded by now stays, so no collection looks at it again."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*YOUNG, NEVER)
        self._clock.call_later(LEAST_PAUSE_S, self._collect)

    def _collect(self) -> None:
        began_s = self._clock.time()
        gc.collect()
        took_s = self._clock.time() - began_s
        self._clock.call_later(max(LEAST_PAUSE_S, took_s / SHARE), self._collect)
