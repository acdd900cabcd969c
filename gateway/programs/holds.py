"""Calls and getters that wait for a variable which nobody produces so far: they do not wait for ever.

Nor do native steps that wait for their client.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.session import Getter, Session, unproduced


class Unproduced(NamedTuple):
    """A call or getter that waits for `variable`, which nobody produces. A native step waits for its own output."""

    session: Session
    waiter: HeldCall | Getter
    variable: str


class Holds:
    """The waiting calls and getters, each for `timeout_s`. A variable that has a producer once has one for ever."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._due: OrderedDict[HeldCall | Getter, tuple[float, Session]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, session: Session, waiter: HeldCall | Getter, now_s: float) -> None:
        """It begins to wait. Nothing happens if all that it waits for has a producer."""
        self.drop(waiter)  # a native step waits for inputs, and then for its client
        if unproduced(session, waiter) is not None:
            self._due[waiter] = now_s + self._timeout_s, session

    def drop(self, waiter: HeldCall | Getter) -> None:
        """It waits no more."""
        self._due.pop(waiter, None)

    def overdue(self, now_s: float) -> list[Unproduced]:
        """Those whose time is over and that still wait for a variable without a producer. Forgets them."""
        found = []
        while self._due:
            waiter, (due_s, session) = next(iter(self._due.items()))
            if due_s > now_s:
                break
            del self._due[waiter]
            variable = unproduced(session, waiter)
            if variable is not None:
                found.append(Unproduced(session, waiter, variable))
        return found
