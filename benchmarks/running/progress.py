"""How far a run is."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Final

SILENT_S: Final = 2.0
CELLS: Final = 40


class Progress:
    """A bar on a terminal's stderr, once there is something to wait for."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started_s = monotonic()

    def advance(self) -> None:
        """One more task is over."""
        self._done += 1
        elapsed_s = monotonic() - self._started_s
        if elapsed_s < SILENT_S or not sys.stderr.isatty():
            return
        filled = CELLS * self._done // self._total
        left_s = elapsed_s * (self._total - self._done) / self._done
        bar = "#" * filled + "." * (CELLS - filled)
        end = "\n" if self._done == self._total else ""
        print(f"\r[{bar}] {self._done}/{self._total}, {left_s:4.0f} s left ", end=end, file=sys.stderr, flush=True)
