"""What a client sends again because an answer was lost: calls, values and failures that its session has already."""

from __future__ import annotations

from plait.gateway.programs.failure_cause import FailureCause
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.session import Session


def repeated(session: Session, call: HeldCall) -> HeldCall | None:
    """The call that `call` repeats: the session's producer of the same variable, with the same fingerprint."""
    output = call.output
    first = None if output is None else session.outputs.get(output.variable)
    return None if first is None or call.fingerprint is None or first.fingerprint != call.fingerprint else first


def is_set(session: Session, variable: str, value: str) -> bool:
    """Whether a client has set the variable to this value before, as the output of a native step or without one."""
    producer = session.outputs.get(variable)
    return session.values.get(variable) == value and (producer is None or producer.is_native)


def has_failed(session: Session, variable: str, what: FailureCause) -> bool:
    """Whether the variable has failed before because of just this, and not because of an input."""
    cause = session.graph.view.cause(variable)
    return cause is not None and cause.because_of is None and cause.what == what
