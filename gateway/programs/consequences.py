"""The consequences of a change in a session's graph: getters are answered, calls run, and unwanted calls end.

The objectives that calls run with come from their annotations and deductions: see docs/design/request-graph.md and
docs/design/clocks.md.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from plait.backends.errors import PlaitError
from plait.gateway.calls.tokenization import CHARACTERS_PER_TOKEN
from plait.gateway.programs.gathering import Gathering
from plait.gateway.programs.held_call import HeldCall, ReadyCall
from plait.gateway.programs.session import Getter, Session, unproduced, untaken
from plait.gateway.programs.session_errors import (
    UNWANTED,
    cancelled,
    input_failed,
    is_skip,
    skip_cause,
    variable_failed,
)
from plait.gateway.programs.slices import AT_ONCE, Continuations
from plait.gateway.timer import At
from plait.policy.programs.needs import Mark, Stage
from plait.policy.programs.objectives import slo_of
from plait.policy.programs.request_graph_state import Cause, Effects
from plait.policy.types import Slo, TaskGroup

Group = tuple[TaskGroup, float]
"""A task group, and the longest predicted time of one of its calls, alone on an engine."""

Prediction = Callable[[str, int, int | None], float]
"""Predicts the seconds that a call takes alone on an engine.

Its arguments are the model, the prompt tokens and the output limit (None: no limit).
"""


class Unproduced(NamedTuple):
    """A call or getter that waits for `variable`, which nobody produces. A native step waits for its own output."""

    session: Session
    waiter: HeldCall | Getter
    variable: str


class Holds:
    """Calls and getters that wait for a variable which nobody produces so far, each for `timeout_s`.

    So do native steps that wait for their client. A variable that has a producer once has one for ever.
    """

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


class Job(NamedTuple):
    """A job that a getter waited for: from the arrival of its first call to the value, in seconds."""

    tenant: str
    seconds: float
    mark: Mark | None


EndedCall = tuple[HeldCall, Cause | None]
"""A call that has ended, and why; None if it has finished."""


class Consequences:
    """Part of the executor. `homes` maps each call that has not ended to its session.

    `holds` has those that wait for what nobody produces. `variables` counts those set, failed and skipped.
    `continuations` has what is left of large events.
    """

    def __init__(
        self, predicted_s: Prediction, gather_s: float, hold_s: float, at: At, on_job: Callable[[Job], None]
    ) -> None:
        self.homes: dict[HeldCall, Session] = {}
        self.holds = Holds(hold_s)
        self.variables = Counter[str]()
        self._predicted_s = predicted_s
        self._on_job = on_job
        self.continuations = Continuations(at)
        self._gathering = Gathering(gather_s, at, self.run)
        self._entering: dict[Session, list[HeldCall]] = {}
        self._to_look_at: list[HeldCall] = []
        self._cancelling = False

    def predict(self, call: HeldCall, input_characters: int = 0) -> None:
        """Set the call's `predicted_s`. `input_characters` is the total length of its known inputs."""
        if call.native_s is not None:
            call.predicted_s = call.native_s
            return
        tokens = call.prompt_tokens + input_characters // CHARACTERS_PER_TOKEN
        call.predicted_s = self._predicted_s(call.model, tokens, call.output_tokens)

    def apply(self, session: Session, effects: Effects, now_s: float) -> None:
        """Bring the session up to date with the graph, then notify getters and call owners.

        Calls whose conditions do not hold after the event are skipped with it.
        """
        events = [effects]
        changed, ended = self._update(session, effects)
        for call in untaken(session, effects):
            if call in self.homes:
                events.append(session.graph.cancel(call.call_id, skip_cause(call)))
                more_changed, more_ended = self._update(session, events[-1])
                changed |= more_changed
                ended += more_ended
        session.account()
        if effects.added in session.calls:
            self._gathering.arrived(session, session.calls[effects.added], now_s)
        calls = self._gathering.joined(session, changed)
        if effects.added is not None:  # an end says nothing new of what runs
            calls += begun(session, changed)
        calls += self._ready(session, effects, now_s)
        promises = self._promised(session, calls[:AT_ONCE], now_s)
        for event in events:
            self._answer_getters(session, event, now_s)
        self.continuations.each(ended, _break_off, now_s)
        self._tell(promises, now_s)
        self._run_later(session, calls[AT_ONCE:], now_s)
        cut = [link.producer for event in events if event.ended for link in event.cut]
        if cut:
            self.cancel_unwanted([session.calls[call_id] for call_id in cut if call_id in session.calls], now_s)

    def _update(self, session: Session, effects: Effects) -> tuple[dict[str, None], list[EndedCall]]:
        """Bring all but the clients up to date. Returns the calls whose deductions changed, and those that ended."""
        changed = session.deductions.apply(effects)
        added = session.calls.get(effects.added or "")
        if added is not None and added.objective is not None:
            changed += session.deductions.annotate(added.call_id, added.objective)
        if effects.variable_set is not None:
            self.variables["set"] += 1
        for variable, cause in effects.variables_failed:
            self.variables["skipped" if is_skip(cause) else "failed"] += 1
            session.fail_output(variable)
        ended = [(call, end.cause) for end in effects.ended if (call := session.calls.get(end.call_id)) is not None]
        for call, _ in ended:
            self.drop(call)
        return dict.fromkeys(changed), ended

    @contextmanager
    def entering(self, session: Session, now_s: float) -> Iterator[None]:
        """More of one program enters the session in the block. Calls that become ready in it run after it.

        They run with what is deduced from the whole program, so they need not gather. Running calls are refined then.
        """
        self._entering[session] = []
        try:
            yield
        finally:
            calls = dict.fromkeys(self._entering.pop(session))
            self.run(session, [call for call in calls if call in self.homes], now_s)

    def run(self, session: Session, calls: Sequence[HeldCall], now_s: float) -> None:
        """Start ready calls, which have stopped gathering, with their objectives. Refine those of running calls."""
        self._tell(self._promised(session, calls[:AT_ONCE], now_s), now_s)
        self._run_later(session, calls[AT_ONCE:], now_s)

    def _run_later(self, session: Session, calls: Sequence[HeldCall], now_s: float) -> None:
        """Run these calls with the next event, but for those that have ended by then."""
        if calls:
            self.continuations.add(
                lambda now_s: self.run(session, [one for one in calls if one in self.homes], now_s), now_s
            )

    def marked(self, session: Session, changed: Iterable[str], now_s: float) -> None:
        """The objectives of these calls were deduced anew: those that gather run, and running ones are refined."""
        changed = dict.fromkeys(changed)
        self.run(session, [*self._gathering.joined(session, changed), *begun(session, changed)], now_s)

    def forget_absent(self, calls: Sequence[HeldCall], now_s: float) -> None:
        """One client of each of these calls has gone and will not come back."""
        for call in calls:
            call.give_up()
        self.cancel_unwanted(calls, now_s)

    def cancel_unwanted(self, calls: Iterable[HeldCall], now_s: float) -> None:
        """Cancel each of `calls` that no client, call or getter waits for, then look at its producers."""
        self._to_look_at += calls
        if self._cancelling:
            return  # the outer call's loop takes them: recursion would be too deep for a long chain
        self._cancelling = True
        try:
            for _ in range(AT_ONCE):
                if not self._to_look_at:
                    return
                call = self._to_look_at.pop()
                session = self.homes.get(call)
                if session is not None and _is_unwanted(session, call):
                    effects = session.graph.cancel(call.call_id, UNWANTED)
                    session.record.call_ended(call, UNWANTED, "cancelled", now_s)
                    self.apply(session, effects, now_s)
            self.continuations.add(partial(self.cancel_unwanted, ()), now_s)
        finally:
            self._cancelling = False

    def drop(self, call: HeldCall) -> None:
        """Forget a call that has ended."""
        session = self.homes.pop(call)
        session.drop_call(call)
        self._gathering.drop(call)
        self.holds.drop(call)

    def lose(self, calls: Sequence[HeldCall], getters: Sequence[Getter]) -> None:
        """Forget calls and getters that ended with their session."""
        for call in calls:
            del self.homes[call]
            call.forget_text()
            self._gathering.drop(call)
            self.holds.drop(call)
        for getter in getters:
            self.holds.drop(getter)

    def _answer_getters(self, session: Session, effects: Effects, now_s: float) -> None:
        told: list[tuple[Getter, str | PlaitError]] = []
        if effects.variable_set is not None:
            value, made = session.values[effects.variable_set], session.made.get(effects.variable_set)
            waiting = session.take_getters(effects.variable_set)
            told += [(getter, value) for getter in waiting]
            if made is not None:
                for getter in waiting:
                    self._on_job(Job(session.tenant.name, now_s - made.begun_s, getter.mark))
        for variable, cause in effects.variables_failed:
            told += [(getter, variable_failed(variable, cause)) for getter in session.take_getters(variable)]
        session.touch(now_s)
        for getter, _ in told:
            self.holds.drop(getter)
        for getter, answer in told:
            if isinstance(answer, str):
                getter.on_value(answer)
            else:
                getter.on_failed(answer)

    def _ready(self, session: Session, effects: Effects, now_s: float) -> list[HeldCall]:
        """The calls that may start now and do not gather. Their times count from `now_s` (docs/design/clocks.md)."""
        calls = [call for call_id in effects.ready if (call := session.calls.get(call_id)) is not None]
        for call in calls:
            call.ready_s = now_s
            if call.inputs:
                self.predict(call, sum(len(session.values[name]) for name in call.inputs))
        if session in self._entering:
            return calls
        gathers = self._gathering.takes
        return [call for call in calls if call.call_id != effects.added or not gathers(session, call, now_s)]

    def _promised(self, session: Session, calls: Sequence[HeldCall], now_s: float) -> list[tuple[HeldCall, ReadyCall]]:
        if session in self._entering:
            self._entering[session] += calls
            return []
        if calls:
            session.start_clocks()
        return promised(session, calls, now_s)

    def _tell(self, promises: Iterable[tuple[HeldCall, ReadyCall]], now_s: float) -> None:
        for call, ready in promises:
            if call in self.homes:
                call.tell(ready, now_s)


def _is_unwanted(session: Session, call: HeldCall) -> bool:
    if call.clients or call.absent:
        return False
    return not any(node.consumers or node.name in session.getters for node in session.graph.call(call.call_id).unset)


def _break_off(ended: EndedCall) -> None:
    """Tell the owner of a call that has not finished why it has ended."""
    call, cause = ended
    if cause is not None:
        call.owner.on_broken(cancelled(call.call_id, cause) if cause.because_of is None else input_failed(cause))
