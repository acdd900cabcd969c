"""The executor of semantic variables: runs each call of a session the moment that its inputs have values (Parrot, 5.1).

A synchronous core. Events come in with their time (`now_s`, any monotonic clock); whoever waits is told through
`CallOwner` and `Getter`, after the state is what it will be, and may call back. asyncio is its shell in the gateway
(`chained_calls`); a simulator can drive it in virtual time. What has happened to a call that has ended already, or
whose session has, is no event: it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from plait.backends.errors import PlaitError, SessionEndedError
from plait.gateway.calls.guessed_tokens import CHARACTERS_PER_TOKEN
from plait.gateway.config import SessionsConfig
from plait.gateway.programs.failure_cause import FailureCause
from plait.gateway.programs.gathering import Gathering
from plait.gateway.programs.getter import Getter
from plait.gateway.programs.held_call import HeldCall, ReadyCall
from plait.gateway.programs.promises import promised
from plait.gateway.programs.session_errors import cancelled, input_failed, refused, variable_failed
from plait.gateway.programs.sessions import Session, Sessions
from plait.gateway.timer import At
from plait.policy.programs.request_graph_effects import Effects
from plait.policy.programs.request_graph_state import Cause, GraphError, VariableState
from plait.policy.programs.variable_prefix import NO_OUTLINE

Prediction = Callable[[str, int, int | None], float]
"""Seconds that a call takes alone, from its model, its prompt tokens and its limit of output tokens."""


class Executor:
    """The sessions' calls and variables. `predicted_s` weighs calls against each other, for what they are promised.

    `at` has an event happen at a time.
    """

    def __init__(self, limits: SessionsConfig, predicted_s: Prediction, at: At) -> None:
        self.sessions = Sessions(limits)
        self.variables_set = 0
        self.variables_failed = 0
        self._predicted_s = predicted_s
        self._gathering = Gathering(limits.gather_ms / 1e3, at, self._run)
        self._homes: dict[HeldCall, Session] = {}  # of the calls that have not ended
        self._to_look_at: list[HeldCall] = []
        self._cancelling = False

    # A call's way.

    def repeated(self, session: Session, call: HeldCall) -> HeldCall | None:
        """The call that `call` repeats: it has the same fingerprint, and makes the variable or has made it."""
        output = call.output
        first = None if output is None else session.outputs.get(output.variable)
        return None if first is None or call.fingerprint is None or first.fingerprint != call.fingerprint else first

    def add(self, session: Session, call: HeldCall, now_s: float) -> None:
        """A call arrives. Its owner is told when it is ready, which may be at once.

        A failed variable that it is to make is made anew. Raises `ConflictError` for a second producer or a cycle,
        `LimitError` or `ValueTooLargeError` for what goes beyond the tenant's limits, and `FailedDependencyError` if
        an input has failed.
        """
        names = [output.variable for output in call.outputs]
        self._check_room(session, call, names)
        self._forget_failed(session, call.inputs, names)
        try:
            effects = session.graph.add(call.call_id, call.inputs, names)
        except GraphError as error:
            session.account()
            raise refused(error) from error
        call.arrived_s = now_s
        session.outputs |= dict.fromkeys(names, call)
        if call.call_id not in session.graph:
            self._apply(session, effects, now_s)
            raise input_failed(effects.ended[0].cause or Cause("an input failed", call.call_id))
        call.predicted_s = self._predicted_s(call.model, call.prompt_tokens, call.output_tokens)
        session.calls[call.call_id] = call
        self._homes[call] = session
        session.account(call.held_bytes)
        self._apply(session, effects, now_s)

    def start(self, call: HeldCall, now_s: float) -> None:
        """A ready call is sent to an engine."""
        session = self._homes.get(call)
        if session is not None:
            self._apply(session, session.graph.start(call.call_id), now_s)

    def generated(self, call: HeldCall, text: str) -> None:
        """More text of what the call makes now; those who want to see it grow get it, unless it is transformed."""
        call.pieces.append(text)
        self._show(call, text)

    def begin_anew(self, call: HeldCall) -> None:
        """What was generated of the call's current output is void: it will be generated again."""
        if call.pieces:
            call.pieces.clear()
            self._show(call, None)

    def produce(self, call: HeldCall, value: str, now_s: float) -> None:
        """A running call's current output has its value. Raises `ValueTooLargeError`."""
        session, output = self._homes.get(call), call.output
        if session is None:
            return
        assert output is not None, "the graph has as many outputs"
        size_bytes, problem = self.sessions.check_value(session, value)
        if problem is not None:
            raise problem
        effects = session.graph.produce(call.call_id, output.variable)
        session.values[output.variable] = value
        session.account(size_bytes)
        call.produced += 1
        call.pieces.clear()
        self._apply(session, effects, now_s)

    def finish(self, call: HeldCall, now_s: float) -> None:
        """A running call has made all that it makes."""
        session = self._homes.get(call)
        if session is not None:
            self._apply(session, session.graph.finish(call.call_id), now_s)

    def fail(self, call: HeldCall, what: FailureCause | str, now_s: float) -> None:
        """A call has ended without all of its outputs, because of `what`; its owner knows and is not told."""
        session = self._homes.get(call)
        if session is not None:
            effects = session.graph.fail(call.call_id, what)
            self._drop(call)
            self._apply(session, effects, now_s)

    def keeps(self, session: Session, size_bytes: int) -> bool:
        """Whether an answer of this size may be kept for a repetition, and counts from now on: only while the tenant's
        sessions hold less than half of what they may.
        """
        if session.ended or session.tenant.held_bytes + size_bytes > self.sessions.limits.max_held_bytes // 2:
            return False
        session.account(size_bytes)
        return True

    def leave(self, call: HeldCall, now_s: float) -> None:
        """One of a call's clients has gone: what nobody else waits for is cancelled."""
        call.clients -= 1
        self._cancel_unwanted([call], now_s)

    # Variables.

    def set_value(self, session: Session, variable: str, value: str, now_s: float) -> None:
        """The client gives a variable its value. Raises `ConflictError` if it has a producer, and limits."""
        size_bytes, problem = self.sessions.check_value(session, value)
        new = variable not in session.outputs and session.graph.variable_state(variable) is None
        problem = problem or self.sessions.check_room(session, variables=int(new))
        if problem is not None:
            raise problem
        self._forget_failed(session, (), [variable])
        try:
            effects = session.graph.set_value(variable)
        except GraphError as error:
            raise refused(error) from error
        session.values[variable] = value
        session.outputs[variable] = None
        session.account(size_bytes)
        self._apply(session, effects, now_s)

    def get(self, session: Session, getter: Getter, now_s: float) -> None:
        """Somebody waits for a variable, which nobody may have named yet; what is there already is told at once."""
        session.touched_s = now_s
        variable = getter.variable
        if variable in session.values:
            getter.on_value(session.values[variable])
            return
        cause = session.graph.cause(variable)
        if cause is not None:
            getter.on_failed(variable_failed(variable, cause))
            return
        session.getters.setdefault(variable, []).append(getter)
        if getter.mark is not None:
            self._run(session, self._gathering.joined(session, session.deductions.get(variable, getter.mark)), now_s)
        call = session.outputs.get(variable)
        if call is None or getter.on_delta is None or not call.pieces:
            return
        if call.output is not None and call.output.variable == variable and call.output.transform is None:
            getter.on_delta(call.text)

    def release(self, session: Session, getter: Getter, now_s: float) -> None:
        """Somebody waits no longer; one who has been told is not waiting any more, and nothing happens."""
        getters = session.getters.get(getter.variable, [])
        if getter not in getters:
            return
        getters.remove(getter)
        if not getters:
            del session.getters[getter.variable]
        if getter.mark is not None:
            session.deductions.release(getter.variable, getter.mark)
        call = session.outputs.get(getter.variable)
        if call is not None:
            self._cancel_unwanted([call], now_s)

    # Sessions.

    def end(self, session: Session, why: str) -> None:
        """End a session: what runs or waits in it is told, and its memory is free."""
        if session.ended:
            return
        error = SessionEndedError(f"The session '{session.session_id}' {why}.")
        calls, getters = self.sessions.end(session)
        for call in calls:
            del self._homes[call]
            self._gathering.drop(call)
        for call in calls:
            call.owner.on_broken(error)
        for getter in getters:
            getter.on_failed(error)

    def expire(self, now_s: float) -> int:
        """End the sessions that have been idle for too long; returns how many. Called now and then."""
        expired = self.sessions.idle(now_s)
        for session in expired:
            self.end(session, "has expired")
        return len(expired)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        self.sessions.check()
        assert self._homes == {call: session for session in self.sessions for call in session.calls.values()}

    # What follows.

    def _apply(self, session: Session, effects: Effects, now_s: float) -> None:
        """Bring everything up to date with the graph, and then tell those whom it concerns."""
        session.touched_s = now_s
        changed = session.deductions.apply(effects)
        added = session.calls.get(effects.added or "")
        if added is not None and added.objective is not None:
            changed += session.deductions.annotate(added.call_id, added.objective)
        self.variables_set += effects.variable_set is not None
        self.variables_failed += len(effects.variables_failed)
        session.outputs |= dict.fromkeys((failed.variable for failed in effects.variables_failed), None)
        ended = [(call, end.cause) for end in effects.ended if (call := session.calls.get(end.call_id)) is not None]
        for call, _ in ended:
            self._drop(call)
        session.account()
        calls = [*self._gathering.joined(session, changed), *self._ready(session, effects, now_s)]
        ready = promised(session, calls, now_s)
        self._answer_getters(session, effects)
        for call, cause in ended:
            if cause is not None:
                call.owner.on_broken(_broken(call, cause))
        self._tell_ready(ready)
        if effects.ended:
            producers = (session.calls.get(link.producer) for link in effects.cut)
            self._cancel_unwanted([call for call in producers if call is not None], now_s)

    def _show(self, call: HeldCall, text: str | None) -> None:
        """Tell those who watch the current output, unless it is transformed, of more text (None: it begins anew)."""
        session = self._homes.get(call)
        if session is not None and call.output is not None and call.output.transform is None:
            for getter in session.getters.get(call.output.variable, ()):
                if getter.on_delta is not None:
                    getter.on_delta(text)

    def _answer_getters(self, session: Session, effects: Effects) -> None:
        told: list[tuple[Getter, str | PlaitError]] = []
        if effects.variable_set is not None:
            value = session.values[effects.variable_set]
            told += [(getter, value) for getter in session.getters.pop(effects.variable_set, ())]
        for variable, cause in effects.variables_failed:
            getters = session.getters.pop(variable, ())
            told += [(getter, variable_failed(variable, cause)) for getter in getters]
        for getter, answer in told:
            if isinstance(answer, str):
                getter.on_value(answer)
            else:
                getter.on_failed(answer)

    def _ready(self, session: Session, effects: Effects, now_s: float) -> list[HeldCall]:
        """The calls that may be started, and do not gather; they count from now on (DESIGN 4.8)."""
        calls = [session.calls[call_id] for call_id in effects.ready]
        for call in calls:
            call.ready_s = now_s
            if call.inputs:
                characters = sum(len(session.values[name]) for name in call.inputs)
                tokens = call.prompt_tokens + characters // CHARACTERS_PER_TOKEN
                call.predicted_s = self._predicted_s(call.model, tokens, call.output_tokens)
        gathers = self._gathering.takes
        return [call for call in calls if call.call_id != effects.added or not gathers(session, call, now_s)]

    def _run(self, session: Session, calls: Sequence[HeldCall], now_s: float) -> None:
        """Have ready calls run with what they are promised."""
        self._tell_ready(promised(session, calls, now_s))

    def _tell_ready(self, ready: Iterable[tuple[HeldCall, ReadyCall]]) -> None:
        for call, start in ready:
            if call in self._homes:
                call.owner.on_ready(start)

    def _cancel_unwanted(self, calls: Iterable[HeldCall], now_s: float) -> None:
        """Cancel those of `calls` that nobody waits for, and so on upstream: no client, no call, no get."""
        self._to_look_at += calls
        if self._cancelling:
            return  # what is cancelled below brings its producers here: a loop, as chains may be long
        self._cancelling = True
        try:
            while self._to_look_at:
                call = self._to_look_at.pop()
                session = self._homes.get(call)
                if session is not None and _is_unwanted(session, call):
                    effects = session.graph.cancel(call.call_id, "nobody waits for it any more")
                    self._apply(session, effects, now_s)
        finally:
            self._cancelling = False

    def _check_room(self, session: Session, call: HeldCall, outputs: Iterable[str]) -> None:
        states = [session.graph.variable_state(name) for name in call.inputs]
        problem = self.sessions.check_room(
            session,
            variables=states.count(None) + sum(session.graph.variable_state(name) is None for name in outputs),
            waiting_calls=int(any(state is not VariableState.SET for state in states)),
            held_bytes=call.held_bytes,
        )
        if problem is not None:
            raise problem

    def _forget_failed(self, session: Session, inputs: Iterable[str], outputs: Sequence[str]) -> None:
        """A variable that has failed may be made anew, unless the call that is to do so cannot be added anyway."""
        failed = {name for name in outputs if session.state_of(name) is VariableState.FAILED}
        others = [session.graph.producer(name) for name in outputs if name not in failed]
        if len(failed) + len(others) == len(outputs) and not any(others) and failed.isdisjoint(inputs):
            for name in failed:
                session.graph.forget(name)
                del session.outputs[name]

    def _drop(self, call: HeldCall) -> None:
        session = self._homes.pop(call)
        del session.calls[call.call_id]
        session.account(-call.held_bytes)
        call.pieces.clear()
        call.outline = NO_OUTLINE
        self._gathering.drop(call)


def _is_unwanted(session: Session, call: HeldCall) -> bool:
    graph, getters = session.graph, session.getters
    return not (
        call.clients
        or any(graph.consumers(call.call_id))
        or any(name in getters for name in graph.unset_outputs(call.call_id))
    )


def _broken(call: HeldCall, cause: Cause) -> PlaitError:
    if cause.because_of is None:
        return cancelled(call.call_id, cause)
    return input_failed(cause)
