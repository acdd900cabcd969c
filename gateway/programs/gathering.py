"""Gathering: a call that could run at once waits a short time for the rest of its program.

An application sends all its calls together. The first call is ready before the gateway knows the calls that depend on
it, so its objective cannot be deduced yet. Without the wait, the first call of the critical path would run without an
objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.session import Session
from plait.gateway.timer import At
from plait.policy.programs.objectives import NOTHING, Deduction
from plait.policy.types import NO_SLO


class Gathering:
    """The calls that gather. A call gathers for at most `moment_s`; then `end` is called (0: no call gathers)."""

    def __init__(self, moment_s: float, at: At, end: Callable[[Session, list[HeldCall], float], None]) -> None:
        self._moment_s = moment_s
        self._at = at
        self._end = end
        self._calls: set[HeldCall] = set()

    def takes(self, session: Session, call: HeldCall, now_s: float) -> bool:
        """Start gathering a call that is ready on arrival, if it has outputs and nobody has said what it is for.

        A native step needs no objective, so it does not gather. Returns whether the call gathers.
        """
        if not self._moment_s or not call.outputs or call.is_native:
            return False
        if call.objective is not None or call.slo not in (None, NO_SLO):
            return False
        if not _is_open(session.deductions.of(call.call_id)):
            return False
        self._calls.add(call)
        self._at(now_s + self._moment_s, partial(self._over, session, call))
        return True

    def joined(self, session: Session, changed: Iterable[str]) -> list[HeldCall]:
        """End the gathering of the session's calls whose deductions `changed` and are no guess; returns those calls."""
        if not self._calls:
            return []
        gathering = [call for call_id in changed if (call := session.calls.get(call_id)) in self._calls]
        joined = [call for call in gathering if not session.deductions.of(call.call_id).is_guess]
        self._calls.difference_update(joined)
        return joined

    def drop(self, call: HeldCall) -> None:
        """Forget a call that has ended, whether it gathered or not."""
        self._calls.discard(call)

    def _over(self, session: Session, call: HeldCall, now_s: float) -> None:
        if call in self._calls:
            self._calls.remove(call)
            self._end(session, [call], now_s)


def _is_open(deduction: Deduction) -> bool:
    return deduction == NOTHING or deduction.is_guess
