"""The consequences of a change in a session's graph: getters are answered, calls run, and unwanted calls end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from plait.backends.errors import PlaitError
from plait.gateway.calls.guessed_tokens import CHARACTERS_PER_TOKEN
from plait.gateway.programs.failure_cause import UNWANTED
from plait.gateway.programs.gathering import Gathering
from plait.gateway.programs.getter import Getter
from plait.gateway.programs.held_call import HeldCall, ReadyCall
from plait.gateway.programs.holds import Holds
from plait.gateway.programs.promises import begun, promised
from plait.gateway.programs.session import Session
from plait.gateway.programs.session_errors import cancelled, input_failed, variable_failed
from plait.gateway.programs.slices import AT_ONCE, Continuations
from plait.gateway.programs.untaken import is_skip, skip_cause, untaken
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
            session.outputs[variable] = None
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
            call.absent -= 1
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
                    self.apply(session, effects, now_s)
            self.continuations.add(partial(self.cancel_unwanted, ()), now_s)
        finally:
            self._cancelling = False

    def drop(self, call: HeldCall) -> None:
        """Forget a call that has ended."""
        session = self.homes.pop(call)
        del session.calls[call.call_id]
        session.hold(-call.held_bytes - call.forget_text())
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
            waiting = session.getters.pop(effects.variable_set, [])
            told += [(getter, value) for getter in waiting]
            if made is not None:
                for getter in waiting:
                    self._on_job(Job(session.tenant.name, now_s - made.begun_s, getter.mark))
        for variable, cause in effects.variables_failed:
            getters = session.getters.pop(variable, ())
            told += [(getter, variable_failed(variable, cause)) for getter in getters]
        session.touch(now_s)
        for getter, _ in told:
            session.not_clocked.pop(getter, None)
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
    view, getters = session.graph.view, session.getters
    return not (
        call.clients
        or call.absent
        or any(view.consumers(call.call_id))
        or any(name in getters for name in view.unset_outputs(call.call_id))
    )


def _break_off(ended: EndedCall) -> None:
    """Tell the owner of a call that has not finished why it has ended."""
    call, cause = ended
    if cause is not None:
        call.owner.on_broken(cancelled(call.call_id, cause) if cause.because_of is None else input_failed(cause))
