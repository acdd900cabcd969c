"""What a client sends again because an answer was lost: calls and values that its session has already."""

from __future__ import annotations

from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.session import Session


def repeated(session: Session, call: HeldCall) -> HeldCall | None:
    """The call that `call` repeats: the session's producer of the same variable, with the same fingerprint."""
    output = call.output
    first = None if output is None else session.outputs.get(output.variable)
    return None if first is None or call.fingerprint is None or first.fingerprint != call.fingerprint else first


def is_set(session: Session, variable: str, value: str) -> bool:
    """Whether a client has set the variable to this value before."""
    return session.values.get(variable) == value and session.outputs.get(variable) is None
