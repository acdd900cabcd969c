"""The consequences of a change in a session's graph: getters are answered, calls run, and unwanted calls end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from plait.backends.errors import PlaitError
from plait.gateway.calls.tokenization import CHARACTERS_PER_TOKEN
from plait.gateway.programs.held_call import HeldCall, ReadyCall
from plait.gateway.programs.promises import begun, promised
from plait.gateway.programs.session import Getter, Session
from plait.gateway.programs.session_errors import (
    UNWANTED,
    cancelled,
    input_failed,
    is_skip,
    skip_cause,
    variable_failed,
)
from plait.gateway.programs.slices import AT_ONCE, Continuations
from plait.gateway.programs.waiting import Gathering, Holds, untaken
from plait.gateway.timer import At
from plait.policy.programs.needs import Mark
from plait.policy.programs.request_graph_state import Cause, Effects

Prediction = Callable[[str, int, int | None], float]
"""Predicts the seconds that a call takes alone on an engine.

Its arguments are the model, the prompt tokens and the output limit (None: no limit).
"""


class Job(NamedTuple):
    """A job that a getter waited for: from the arrival of its first call to the value, in seconds."""

    tenant: str
    seconds: float
    mark: Mark | None


BrokenCall = tuple[HeldCall, Cause]
"""A call that has ended before it has finished, and why."""


class Consequences:
    """Part of the executor: brings everything up to date after a change of a graph, and tells those concerned."""

    def __init__(
        self, predicted_s: Prediction, gather_s: float, hold_s: float, at: At, on_job: Callable[[Job], None]
    ) -> None:
        self.homes: dict[HeldCall, Session] = {}  # of each call that has not ended
        self.holds = Holds(hold_s)  # of those that wait for what nobody produces
        self.variables = Counter[str]()  # those set, failed and skipped so far
        self.continuations = Continuations(at)  # what is left of large events
        self._predicted_s = predicted_s
        self._on_job = on_job
        self._gathering = Gathering(gather_s, at, self.run)
        self._entering: dict[Session, list[HeldCall]] = {}  # what becomes ready while a program enters
        self._to_look_at: list[HeldCall] = []  # whether anybody still wants them
        self._cancelling = False

    def predict(self, call: HeldCall, input_characters: int = 0) -> None:
        """Set the call's `predicted_s`. `input_characters` is the total length of its known inputs."""
        if call.native_s is not None:
            call.predicted_s = call.native_s
            return
        tokens = call.prompt_tokens + input_characters // CHARACTERS_PER_TOKEN
        call.predicted_s = self._predicted_s(call.model, tokens, call.output_tokens)

    def apply(self, session: Session, effects: Effects, deduced: Iterable[str], now_s: float) -> None:
        """Bring the session up to date with an event of its graph, then notify getters and call owners.

        `deduced` are the calls whose objectives are others after it. Calls whose conditions do not hold after it are
        skipped with it.
        """
        events, changed, broken = [effects], dict.fromkeys(deduced), list[BrokenCall]()
        self._update(session, effects, changed, broken)
        for call in untaken(session, effects):
            if call in self.homes:
                skipped = session.graph.cancel(call.call_id, skip_cause(call))
                changed |= dict.fromkeys(session.deductions.apply(skipped))
                events.append(skipped)
                self._update(session, skipped, changed, broken)
        session.account()
        calls = self._to_tell(session, effects, changed, now_s)
        promises = self._promised(session, calls[:AT_ONCE], now_s) if calls else []
        for event in events:
            self._answer_getters(session, event, now_s)
        if broken:
            self.continuations.each(broken, _break_off, now_s)
        if calls:
            self._tell(promises, now_s)
            self._run_later(session, calls[AT_ONCE:], now_s)
        cut = [link.producer for event in events if event.ended for link in event.cut]
        if cut:
            self.cancel_unwanted([session.calls[call_id] for call_id in cut if call_id in session.calls], now_s)

    def _update(self, session: Session, effects: Effects, changed: dict[str, None], broken: list[BrokenCall]) -> None:
        """Bring all but the clients up to date. Notes the calls whose deductions changed, and those broken off."""
        added = None if effects.added is None else session.calls.get(effects.added)
        if added is not None and added.objective is not None:
            changed |= dict.fromkeys(session.deductions.annotate(added.call_id, added.objective))
        if effects.variable_set is not None:
            self.variables["set"] += 1
        for variable, cause in effects.variables_failed:
            self.variables["skipped" if is_skip(cause) else "failed"] += 1
            session.fail_output(variable)
        for call_id, _, why in effects.ended:
            call = session.calls.get(call_id)
            if call is not None:
                self.drop(call)
                if why is not None:
                    broken.append((call, why))

    def _to_tell(self, session: Session, effects: Effects, changed: Mapping[str, None], now_s: float) -> list[HeldCall]:
        """The calls that may start now and do not gather, and the running ones whose objectives may have changed.

        Times of a call that may start count from `now_s` (docs/design/clocks.md).
        """
        added = effects.added
        if added in session.calls:
            self._gathering.arrived(session, session.calls[added], now_s)
        calls = self._gathering.joined(session, changed)
        if added is not None:  # an end says nothing new of what runs
            calls += begun(session, changed)
        for call_id in effects.ready:
            call = session.calls.get(call_id)
            if call is None:
                continue
            call.ready_s = now_s
            if call.inputs:
                self.predict(call, sum([len(session.values[name]) for name in call.inputs]))
            may_gather = call_id == added and session not in self._entering
            if not (may_gather and self._gathering.takes(session, call, now_s)):
                calls.append(call)
        return calls

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
                    changed = session.deductions.apply(effects)
                    session.record.call_ended(call, UNWANTED, "cancelled", now_s)
                    self.apply(session, effects, changed, now_s)
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
            for getter in session.take_getters(effects.variable_set):
                told.append((getter, value))
                if made is not None:
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


def _break_off(broken: BrokenCall) -> None:
    """Tell the owner of a call why it has ended."""
    call, cause = broken
    call.owner.on_broken(cancelled(call.call_id, cause) if cause.because_of is None else input_failed(cause))
