"""Work in pieces without an event loop."""

from __future__ import annotations

from typing import TypeVar

from plait.gateway.intake.turns import Pieces

T = TypeVar("T")


def at_once(work: Pieces[T]) -> T:
    """Do all the work without a pause, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
