"""Calls that do not run because their condition does not hold: they are skipped, and so is what needs their outputs."""

from __future__ import annotations

from plait.gateway.calls.annotations import Condition
from plait.gateway.programs.failure_cause import FailureCause
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.session import Session
from plait.policy.programs.request_graph_effects import Effects
from plait.policy.programs.request_graph_state import Cause

SKIPPED = "skipped"
"""The code of the errors of a call that was skipped."""


def untaken(session: Session, effects: Effects) -> list[HeldCall]:
    """The calls whose condition turns out not to hold with an event: its variable got a value, or they came later."""
    call_ids = () if effects.variable_set is None else session.graph.view.users(effects.variable_set)
    if effects.added in session.calls:
        call_ids = (*call_ids, effects.added)
    calls = [session.calls[call_id] for call_id in call_ids]
    return [call for call in calls if call.when is not None and _is_untaken(session, call.when)]


def _is_untaken(session: Session, when: Condition) -> bool:
    value = session.values.get(when.variable)
    return value is not None and not when.holds(value)


def skip_cause(call: HeldCall) -> FailureCause:
    """The cause of all that fails because a call was skipped."""
    return FailureCause(message=f"it was skipped: its condition {call.when} does not hold", code=SKIPPED)


def is_skip(cause: Cause) -> bool:
    """Whether a call or a variable was skipped rather than failed: at the root is a condition that does not hold."""
    return isinstance(cause.root.what, FailureCause) and cause.root.what.code == SKIPPED
