"""Moves the calls of lines whose engines take them no more, some in each turn of the event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from plait.gateway.admission.waiting import Waiting
from plait.gateway.timer import At

MOVED_AT_ONCE: Final = 32
"""So many calls are placed anew in one turn: about 3 ms."""


class Moves:
    """Calls `move` with each of the calls that are `stranded`, in the order in which they came, then `on_done`."""

    def __init__(
        self,
        at: At,
        stranded: Callable[[], list[Waiting]],
        move: Callable[[Waiting, float], None],
        on_done: Callable[[], None],
    ) -> None:
        self._at = at
        self._stranded = stranded
        self._move = move
        self._on_done = on_done
        self._is_due = False

    def soon(self) -> None:
        """Look for calls to move once the event that goes on is over."""
        if not self._is_due:
            self._is_due = True
            self._at(0.0, self._begin)

    def _begin(self, now_s: float) -> None:
        self._is_due = False
        self._go_on(sorted(self._stranded(), key=lambda call: -call.number), now_s)

    def _go_on(self, calls: list[Waiting], now_s: float) -> None:
        """Move the last of these calls, and the others in later turns."""
        for call in [calls.pop() for _ in calls[:MOVED_AT_ONCE]]:
            self._move(call, now_s)
        if calls:
            self._at(0.0, partial(self._go_on, calls))
        else:
            self._on_done()
