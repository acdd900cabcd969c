"""The calls and getters of a session that can get nothing once clients send no more requests."""

from __future__ import annotations

from plait.gateway.programs.getter import Getter
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.session import Session


def stranded(session: Session) -> tuple[list[HeldCall], list[Getter]]:
    """Those that wait for a variable which no call produces that runs or can still run.

    The client of a native step cannot send its value any more.
    """
    view, lost = session.graph.view, dict[str, HeldCall]()

    def never_comes(variable: str) -> bool:
        producer = view.producer(variable)
        return variable not in session.values and (producer is None or producer in lost)

    for call_id in sorted(session.calls, key=view.rank):  # a call comes after those whose outputs it waits for
        call = session.calls[call_id]
        if call.is_native or any(map(never_comes, call.inputs)):
            lost[call_id] = call
    waiting = [getter for variable, getters in session.getters.items() if never_comes(variable) for getter in getters]
    return list(lost.values()), waiting
