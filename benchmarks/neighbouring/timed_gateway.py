"""A gateway that says how long its loop was held: `python -m benchmarks.neighbouring.timed_gateway FILE serve ...`.

It runs on asyncio's own loop, whose turns can be timed. At SIGUSR1 it writes two times since the last one to FILE, in
seconds of the thread's CPU time: the longest turn without full garbage collections, and the longest full collection.
What other processes take of the machine is not in them.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from asyncio import base_events
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

ONE_TURN: Final = "_run_once"
"""The method of asyncio's loop that runs one turn of it."""


class Turns:
    """The longest turn of a loop without full collections, and the longest of these, in seconds."""

    def __init__(self) -> None:
        self.longest_s = self.longest_collection_s = 0.0
        self._collected_s = 0.0  # in this turn
        self._began_s = 0.0

    def timed(self, run_once: Callable[[Any], None]) -> Callable[[Any], None]:
        """`run_once`, timed."""

        def timed(loop: Any) -> None:
            self._collected_s, began_s = 0.0, time.thread_time()
            run_once(loop)
            took_s = time.thread_time() - began_s - self._collected_s
            if took_s > self.longest_s:  # the signal may come while `max` has its arguments
                self.longest_s = took_s

        return timed

    def on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """A garbage collection begins or ends."""
        if info["generation"] == 2 and phase == "start":
            self._began_s = time.thread_time()
        elif info["generation"] == 2:
            took_s = time.thread_time() - self._began_s
            self._collected_s += took_s
            self.longest_collection_s = max(self.longest_collection_s, took_s)


def time_turns(path: Path) -> None:
    """Time each turn of the loops of this process from now on."""
    turns = Turns()

    def write(_signal: int, _frame: FrameType | None) -> None:
        path.write_text(f"{turns.longest_s} {turns.longest_collection_s}")
        turns.longest_s = turns.longest_collection_s = 0.0

    setattr(base_events.BaseEventLoop, ONE_TURN, turns.timed(getattr(base_events.BaseEventLoop, ONE_TURN)))
    gc.callbacks.append(turns.on_collection)
    signal.signal(signal.SIGUSR1, write)


if __name__ == "__main__":
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # so that uvicorn takes asyncio's loop
    time_turns(Path(sys.argv.pop(1)))
    from plait.gateway.cli import main

    sys.exit(main())
