"""What calls that may run are promised: their values, SLOs and task groups, from annotations and deductions.

See docs/design/request-graph.md and docs/design/clocks.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from plait.gateway.programs.held_call import HeldCall, ReadyCall
from plait.gateway.programs.session import Getter, Session
from plait.policy.programs.needs import Stage
from plait.policy.programs.objectives import slo_of
from plait.policy.types import Slo, TaskGroup

Group = tuple[TaskGroup, float]
"""A task group, and the longest predicted time of one of its calls, alone on an engine."""


def promised(session: Session, calls: Sequence[HeldCall], now_s: float) -> list[tuple[HeldCall, ReadyCall]]:
    """Each call that is ready or runs, with its values and objectives. A share of a JCT counts from now.

    All other times count from the moment at which the call became ready, or at which its objectives changed.
    """
    if not calls:
        return []
    shares = _jct_shares(session, calls, now_s) if session.deductions.paths.timed else {}
    groups: dict[Stage, Group] = {}
    return [(call, _promised(session, call, groups, shares.get(call.call_id))) for call in calls]


def begun(session: Session, changed: Iterable[str]) -> list[HeldCall]:
    """The calls among `changed` that run already, or were told that they may."""
    calls = [call for call_id in changed if (call := session.calls.get(call_id)) is not None]
    return [call for call in calls if call.promise is not None]


def timed_by(session: Session, getter: Getter) -> Iterator[str]:
    """The calls whose times a getter states: the producer, and with a JCT all calls that the variable needs."""
    if isinstance(getter.mark, Slo):
        producer = session.outputs.get(getter.variable)
        if producer is not None:
            yield producer.call_id
        if getter.jct_s is not None:
            yield from session.deductions.paths.upstream(getter.variable)


def _promised(session: Session, call: HeldCall, groups: dict[Stage, Group], share_s: float | None) -> ReadyCall:
    deduction = session.deductions.of(call.call_id)
    group, slowest_s = (None, call.predicted_s)
    if deduction.group is not None:
        if deduction.group not in groups:
            groups[deduction.group] = _group(session, deduction.group)
        group, slowest_s = groups[deduction.group]
    asked = session.deductions.asked(call.call_id)
    slo = slo_of(deduction, slowest_s, own=call.slo, asked=asked, share_s=share_s)
    values = {name: session.values[name] for name in call.inputs}
    assert call.ready_s is not None
    return ReadyCall(values, call.ready_s, slo, call.objective or deduction.objective, group)


def _group(session: Session, stage: Stage) -> Group:
    """The task group of a stage."""
    members = [session.calls[call_id] for call_id in session.deductions.members(stage)]
    name = f"{session.tenant.name}/{session.session_id}/{stage.awaited}/{stage.distance}"
    return TaskGroup(name, len(members)), max(call.predicted_s for call in members)


def _jct_shares(session: Session, calls: Iterable[HeldCall], now_s: float) -> dict[str, float]:
    """Each call's share, in seconds, of the JCTs that getters ask for. Of several shares, the shortest counts."""

    def left_s(variable: str) -> float:
        return min(left_s for getter in session.getters[variable] if (left_s := getter.left_s(now_s)) is not None)

    def call_left_s(call_id: str) -> float:
        call = session.calls[call_id]
        elapsed_s = 0.0 if call.ready_s is None else now_s - call.ready_s
        return max(0.0, call.predicted_s - elapsed_s)

    return session.deductions.paths.shares((call.call_id for call in calls), left_s, call_left_s)
