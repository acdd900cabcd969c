"""What calls that may run are promised: their values, SLOs and task groups, from annotations and deductions.

See docs/design/request-graph.md and docs/design/clocks.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from secrets import token_hex

import msgspec

from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.relay import Relay
from plait.gateway.programs.held_call import HeldCall, Promise, ReadyCall
from plait.gateway.programs.session import Getter, Session
from plait.policy.programs.needs import Stage
from plait.policy.programs.objectives import slo_of
from plait.policy.types import NO_SLO, Slo, TaskGroup

SHORTEST_JCT_S = 0.001
"""A step's JCT if the call's time is used up already."""

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


class StandingPromise:
    """The promise of a call that may run: each delivery gets what it is, also if it changes meanwhile.

    A call has a delivery for each step; one at a time is on its way. `steps_left` counts the step that is on its way or
    comes next, and those after it.
    """

    __slots__ = ("_delivery", "_promise", "_relay", "steps_left")

    def __init__(self, relay: Relay) -> None:
        self.steps_left = 1
        self._relay = relay
        self._promise: Promise
        self._delivery: Delivery | None = None

    @property
    def delivery(self) -> Delivery:
        """The delivery on its way."""
        assert self._delivery is not None, "no delivery is on its way"
        return self._delivery

    def set(self, promise: Promise) -> None:
        """The call is promised this from now on. If it is on its way, its engine is told."""
        self._promise = promise
        if self._delivery is not None:
            self._delivery, handle = self._renewed(self._delivery, self._delivery.handle), self._delivery.handle
            assert handle is not None
            self._relay.refine(handle, self._delivery.call)

    def begin(self, delivery: Delivery) -> None:
        """The delivery is on its way until `end`."""
        self._delivery = self._renewed(delivery, token_hex(16))

    def end(self) -> None:
        """No delivery is on its way."""
        self._delivery = None

    def slo_from(self, zero_s: float) -> Slo | None:
        """A step's SLO: the call's TTFT and TPOT, and an equal share of what is left of its JCT.

        Its times count from `zero_s`. None without an SLO.
        """
        slo, promised_s = self._promise.slo, self._promise.since_s
        if slo is None:
            return None
        since_s = max(zero_s, promised_s)
        if slo.jct_s is not None:
            left_s = promised_s + slo.jct_s - since_s
            slo = slo._replace(jct_s=max(SHORTEST_JCT_S, left_s / self.steps_left))
        return slo.from_zero(since_s - zero_s)

    def _renewed(self, delivery: Delivery, handle: str | None) -> Delivery:
        """The delivery under this handle, with what the call is promised now."""
        promise, slo = self._promise, self.slo_from(delivery.arrived_s) or NO_SLO
        call = delivery.call._replace(slo=slo, objective=promise.objective, group=promise.group)
        return msgspec.structs.replace(delivery, call=call, handle=handle)
