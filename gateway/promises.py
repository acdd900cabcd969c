"""What calls are promised at the moment that they are ready, from what is deduced for them (DESIGN 4.4 and 4.8)."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.held_call import HeldCall, ReadyCall
from gateway.sessions import Session
from policy.objectives_slo import jct_shares, slo_of
from policy.types import TaskGroup


def promised(session: Session, calls: Sequence[HeldCall], now_s: float) -> list[tuple[HeldCall, ReadyCall]]:
    """Each of the calls, which are ready as of now, and what it runs with. Its times count from now."""
    shares = _jct_shares(session, now_s) if calls and session.getters else {}
    return [(call, _promised(session, call, shares.get(call.call_id), now_s)) for call in calls]


def _promised(session: Session, call: HeldCall, share_s: float | None, now_s: float) -> ReadyCall:
    deductions = session.deductions
    deduction = deductions.of(call.call_id)
    slowest_s, group, stage = call.predicted_s, None, deduction.group
    if stage is not None:
        members = deductions.members(stage)
        slowest_s = max(session.calls[member].predicted_s for member in members)
        name = f"{session.tenant.name}/{session.session_id}/{stage.awaited}/{stage.distance}"
        group = TaskGroup(name, len(members))
    slo = slo_of(deduction, slowest_s, own=call.slo, asked=deductions.asked(call.call_id), share_s=share_s)
    values = {name: session.values[name] for name in call.inputs}
    return ReadyCall(values, now_s, slo, call.objective or deduction.objective, group)


def _jct_shares(session: Session, now_s: float) -> dict[str, float]:
    """What each call has of the end-to-end times that are asked for, the tightest of several; in seconds."""

    def left_s(call_id: str) -> float:
        call = session.calls[call_id]
        elapsed_s = 0.0 if call.ready_s is None else now_s - call.ready_s
        return max(0.0, call.predicted_s - elapsed_s)

    tightest: dict[str, float] = {}
    for getter in [getter for waiting in session.getters.values() for getter in waiting]:
        if getter.jct_s is None:
            continue
        if getter.since_s is None:
            upstream = jct_shares(session.graph, getter.variable, 0.0, left_s)
            getter.since_s = min((session.calls[call_id].arrived_s for call_id in upstream), default=None)
        elapsed_s = 0.0 if getter.since_s is None else now_s - getter.since_s
        shares = jct_shares(session.graph, getter.variable, getter.jct_s - elapsed_s, left_s)
        for call_id, share_s in shares.items():
            tightest[call_id] = min(share_s, tightest.get(call_id, share_s))
    return tightest
