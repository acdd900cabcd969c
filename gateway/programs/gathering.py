"""The gathering moment: a call that could run at once waits a little for the rest of its program.

An application fires all its calls together, but the first of them is ready before anything is known of those behind it,
and so of what it is for: the head of the critical path would run as if nobody waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.sessions import Session
from plait.gateway.timer import At
from plait.policy.programs.objectives import NOTHING
from plait.policy.types import Slo


class Gathering:
    """The calls of an executor that gather. `end` is called for each whose `moment_s` is over (0: none gathers)."""

    def __init__(self, moment_s: float, at: At, end: Callable[[Session, list[HeldCall], float], None]) -> None:
        self._moment_s = moment_s
        self._at = at
        self._end = end
        self._calls: set[HeldCall] = set()

    def takes(self, session: Session, call: HeldCall, now_s: float) -> bool:
        """Whether a call that is ready as it arrives gathers from now on: others can take what it makes, and nobody has
        said what it is to be optimised for.
        """
        if not self._moment_s or not call.outputs or call.objective is not None or call.slo not in (None, Slo()):
            return False
        if session.deductions.of(call.call_id) != NOTHING:
            return False
        self._calls.add(call)
        self._at(now_s + self._moment_s, partial(self._over, session, call))
        return True

    def joined(self, session: Session, changed: Iterable[str]) -> list[HeldCall]:
        """Those of a session's calls with a `changed` deduction that gathered: they know now, and gather no longer."""
        if not self._calls:
            return []
        joined = [call for call_id in changed if (call := session.calls.get(call_id)) in self._calls]
        self._calls.difference_update(joined)
        return joined

    def drop(self, call: HeldCall) -> None:
        """A call has ended, whether it gathered or not."""
        self._calls.discard(call)

    def _over(self, session: Session, call: HeldCall, now_s: float) -> None:
        if call in self._calls:
            self._calls.remove(call)
            self._end(session, [call], now_s)
