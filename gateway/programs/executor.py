"""The executor of semantic variables: runs each call of a session as soon as its inputs have values (Parrot, 5.1).

A synchronous core. Each event carries its time (`now_s`, any monotonic clock). Its asyncio shells are in
`gateway/chaining`. A simulator can drive it in virtual time. This is how it works:

The events, who sends them, what each changes first, and what the log has of it (`record.py`)
    open                client   a session, or its time to live (`sessions.py`)        Opened, Kept
    add                 client   a call, and its outputs; it may be skipped at once    Submitted; CallEnded
    set_value           client   a variable's value, after which calls may be skipped  ValueSet; CallEnded
    set_failed          client   a variable's failure, also of a refused call          VariableFailed
    get, release        client   a getter, and the objective that it asks for          nothing: the client asks again
    prefer              client   the session's objective                               Preferred
    leave               client   who waits for a call                                  nothing: a restart ends it
    cancel              client   the end of a call; also of one that nobody wants      CallEnded
    close               client   the session takes no more                             Closed
    delete              client   the end of the session                                Refused, and the stream ends
    start               owner    a ready call runs                                     nothing: it runs again
    attempt             owner    how often the call was given to engines               Started
    hold                owner    the bytes of its prompt                               nothing
    generated           owner    the text of its current output                        nothing: it is generated again
    begin_anew          owner    the same text, which begins again                     nothing
    produce             owner    the same; with the last value the call ends           ValueSet; CallEnded
    finish              owner    the end of a call without outputs                     nothing: no such call is kept
    fail                owner    the end of a call, whose outputs fail                 CallEnded
    expire              time     the end of sessions, and of what has waited too long  the stream ends; CallEnded
    A call's owner is the shell that runs it. Time is what was asked of `At`, and whoever calls `expire` now and then.
    What follows from an event by rule is not in the log. `replay` sends the events again to a new executor.

What an event changes
    The graph first (`policy/programs/request_graph.py`). It says which variables, calls and getters are affected
    (`Effects`). Then the deduced objectives (`policy/programs/objectives.py`). Then the session, by its own methods:
    values, calls, getters, bytes. An event that the session's limits refuse raises before anything has changed. An
    event of an ended call or an ended session changes nothing, because an event may be under way when its call ends.

Who is told
    Only when all state is up to date, and in this order (`Consequences.apply`): getters of a variable that was set or
    has failed, owners of calls that have ended without their doing (`on_broken`), owners of calls that have become
    ready (`on_ready`) or whose objectives have changed (`on_refined`), with what they are promised (`promised`).
    Whoever is told may call the executor again. A call that is ready before the rest of its program has come waits for
    the rest (`Gathering`). Of a large event, a part is told at once and the rest with the next events
    (`Continuations`).

What ends
    A call ends with its last output, when it fails, when an input has failed or its condition does not hold, when
    nobody wants it any more (no client, no getter, no consumer), or with its session. What needs its outputs ends with
    it. A variable has one producer for ever, unless it failed. A session ends when it is deleted, when nothing has
    happened in it for its time to live, or when its tenant needs the room (`sessions.py`).

Who owns what
    Each field of a session or a call has one module that writes it (`tests/test_one_writer.py`): `session.py` and
    `held_call.py` nearly all. The graph owns the states of calls and variables, `sessions.py` the totals' limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from plait.backends.errors import PlaitError, SessionEndedError
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.programs.consequences import Consequences, Job, Prediction
from plait.gateway.programs.held_call import HeldCall, Made, utf8_bytes
from plait.gateway.programs.record import Closed, Preferred, Records, Started, ValueSet, VariableFailed
from plait.gateway.programs.session import Getter, Session, timed_by
from plait.gateway.programs.session_errors import (
    CANCELLED,
    FailureCause,
    input_failed,
    nobody_produces,
    not_computed,
    refused,
    session_closed,
    variable_failed,
)
from plait.gateway.programs.sessions import Sessions, Unproduced, unproduced, waits_for_client
from plait.gateway.timed_events import At
from plait.policy.programs.request_graph import CLIENT
from plait.policy.programs.request_graph_state import Cause, GraphError
from plait.policy.types import Objective


class Variables:
    """The part of the executor through which clients set variables and getters wait for them."""

    def __init__(self, sessions: Sessions, consequences: Consequences) -> None:
        self.counts = consequences.variables  # those set, failed and skipped so far
        self._sessions = sessions
        self._after = consequences

    def set_value(self, session: Session, variable: str, value: str, now_s: float) -> None:
        """Set a variable's value for a client. Raises `ConflictError` if it has a producer, `LimitError` or
        `ValueTooLargeError` beyond the tenant's limits.
        """
        if session.closed:
            raise session_closed(session.session_id)
        size_bytes = utf8_bytes(value)
        new = variable not in session.outputs and variable not in session.graph.variables
        problem = self._sessions.check_size(session, size_bytes, size_bytes)
        problem = problem or self._sessions.make_room(session, variables=int(new))
        if problem is not None:
            raise problem
        session.forget_failed([variable])
        try:
            effects = session.graph.set_value(variable)
        except GraphError as error:
            raise refused(error) from error
        changed = session.deductions.apply(effects)
        session.set_value(variable, value, size_bytes, made=None)
        session.record.write(ValueSet(variable, value), now_s)
        self._after.apply(session, effects, changed, now_s)

    def set_failed(
        self, session: Session, variable: str, what: FailureCause, now_s: float, where: str = CLIENT
    ) -> None:
        """Fail a variable, for `where`: a client that could not compute it, or a call that was refused.

        It may be produced again. Raises `ConflictError` if it has a producer, `LimitError` beyond the tenant's limits.
        """
        new = variable not in session.outputs and variable not in session.graph.variables
        problem = self._sessions.make_room(session, variables=int(new))
        if problem is not None:
            raise problem
        session.forget_failed([variable])
        try:
            effects = session.graph.refuse(where, [variable], what)
        except GraphError as error:
            raise refused(error) from error
        changed = session.deductions.apply(effects)
        session.record.write(VariableFailed(variable, where, what), now_s)
        self._after.apply(session, effects, changed, now_s)

    def get(self, session: Session, getter: Getter, now_s: float) -> None:
        """Add a getter. If the variable is set or failed, the getter is answered at once. It may be unknown so far."""
        session.touch(now_s)
        variable = getter.variable
        if variable in session.values:
            getter.on_value(session.values[variable])
            return
        node = session.graph.variables.get(variable)
        if node is not None and node.cause is not None:
            getter.on_failed(variable_failed(variable, node.cause))
            return
        session.add_getter(getter)
        self._after.holds.add(session, getter, now_s)
        session.touch(now_s)
        if getter.mark is not None:
            changed = session.deductions.get(variable, getter.mark)
            self._after.marked(session, [*changed, *timed_by(session, getter)], now_s)
        call = session.outputs.get(variable)
        if call is None or getter.on_delta is None or not call.text.characters:
            return
        if call.output is not None and call.output.variable == variable and call.output.transform is None:
            getter.on_delta(call.text)

    def release(self, session: Session, getter: Getter, now_s: float) -> None:
        """Remove a getter. No effect once the getter has been answered."""
        if getter not in session.getters.get(getter.variable, ()):
            return
        session.remove_getter(getter)
        self._after.holds.drop(getter)
        if getter.variable not in session.getters:
            session.touch(now_s)
        if getter.mark is not None:
            session.deductions.release(getter.variable, getter.mark)
        call = session.outputs.get(getter.variable)
        if call is not None:
            self._after.cancel_unwanted([call], now_s)


class Endings:
    """The part of the executor that ends sessions, and what waits for a variable that nobody produces."""

    def __init__(self, sessions: Sessions, variables: Variables, consequences: Consequences) -> None:
        self._sessions = sessions
        self._variables = variables
        self._after = consequences

    def close(self, session: Session, now_s: float) -> None:
        """No more calls and values will come. Calls and getters that wait for what nobody produces fail now."""
        session.closed = True
        session.record.write(Closed(), now_s)
        waiting: list[HeldCall | Getter] = list(session.calls.values())
        waiting += [getter for getters in session.getters.values() for getter in getters]
        for waiter in waiting:
            variable = None if session.ended else unproduced(session, waiter)
            if variable is not None:
                self._give_up(Unproduced(session, waiter, variable), now_s)

    def wait_for_client(self, session: Session, step: HeldCall, now_s: float) -> None:
        """The inputs of a native step have values. It fails if its client does not compute it in time.

        It fails at once in a closed session, which takes no more values.
        """
        if session.closed:
            self._give_up(Unproduced(session, step, step.outputs[0].variable), now_s)
        else:
            self._after.holds.add(session, step, now_s)

    def delete(self, session: Session, now_s: float) -> None:
        """End a session for its client. Its id is refused for another time to live (`SessionEndedError`)."""
        until_s = now_s + session.ttl_s
        self._sessions.deleted.add(session.tenant.name, session.session_id, now_s, until_s)
        session.record.deleted(until_s, now_s)
        self.end(session, "was deleted", now_s)

    def end(self, session: Session, why: str | PlaitError, now_s: float) -> None:
        """End a session: fail its calls and getters, and free its memory. `why` may be what these are told."""
        if session.ended:
            return
        error = SessionEndedError(f"The session '{session.session_id}' {why}.") if isinstance(why, str) else why
        calls, getters = self._sessions.end(session, error)
        self._after.lose(calls, getters)
        self._after.continuations.each(calls, lambda call: call.owner.on_broken(error), now_s)
        for getter in getters:
            getter.on_failed(error)

    def end_all(self, why: str, now_s: float) -> None:
        """End every session. When this returns, all owners and getters have been told."""
        for session in list(self._sessions):
            self.end(session, why, now_s)
        self._after.continuations.finish(now_s)

    def expire(self, now_s: float) -> int:
        """End the sessions past their time to live; returns how many. Called periodically.

        Fails the calls and getters that have waited too long for a variable that nobody produces.
        """
        for waiting in self._after.holds.overdue(now_s):
            self._give_up(waiting, now_s)
        expired = self._sessions.idle(now_s)
        for session in expired:
            self.end(session, "has expired", now_s)
        return len(expired)

    def _give_up(self, waiting: Unproduced, now_s: float) -> None:
        """Fail a call or getter that waits for what nobody produces."""
        session, waiter, variable = waiting
        if isinstance(waiter, Getter):
            if waiter in session.getters.get(variable, ()):
                self._variables.release(session, waiter, now_s)
                waiter.on_failed(nobody_produces(variable, session.variables()))
        elif waiter in self._after.homes:
            if waits_for_client(session, waiter):
                error = not_computed(variable, closed=session.closed)
            else:
                error = nobody_produces(variable, session.variables())
            effects, changed = session.end_call(waiter, error.causes[0], "failed", now_s)
            self._after.drop(waiter)
            self._after.apply(session, effects, changed, now_s)
            waiter.owner.on_broken(error)


class Executor:
    """The sessions' calls and variables.

    `predicted_s` predicts how long a call takes; a call's share of an objective depends on it. `at` schedules an event.
    `on_job` is told of each job that ends with a value that a getter waited for. `records` says how each session's
    events are recorded (None: not at all).
    """

    def __init__(
        self,
        limits: SessionsConfig,
        predicted_s: Prediction,
        at: At,
        on_job: Callable[[Job], None] = lambda _: None,
        records: Records | None = None,
    ) -> None:
        self.sessions = Sessions(limits, records)
        self._after = Consequences(predicted_s, limits.gather_ms / 1e3, limits.hold_timeout_s, at, on_job)
        self._at = at
        self.variables = Variables(self.sessions, self._after)
        self.endings = Endings(self.sessions, self.variables, self._after)

    # Events of a call.

    def add(self, session: Session, call: HeldCall, now_s: float) -> None:
        """A call arrives. Its owner's `on_ready` is called once it is ready, possibly at once.

        The call may produce a variable that failed before; the earlier failure is forgotten. Raises `ConflictError` for
        a second producer, a cycle or a closed session, `LimitError` or `ValueTooLargeError` for a call beyond the
        tenant's limits, and `FailedDependencyError` if an input has failed.
        """
        names = call.variables
        if session.closed:
            raise session_closed(session.session_id)
        self.sessions.check_call(session, call, names)
        is_native = call.is_native
        self._after.predict(call)
        try:
            session.forget_failed(names, call.inputs, call.call_id)
            effects = session.graph.add(
                call.call_id, call.inputs, names, is_native=is_native, predicted_s=call.predicted_s
            )
        except GraphError as error:
            session.account()
            raise refused(error) from error
        changed = session.deductions.apply(effects)
        call.arrived_s = now_s
        session.record.submitted(call, now_s)
        call.request = None
        session.add_outputs(names, call)
        if call.call_id not in session.graph.calls:
            self._after.apply(session, effects, changed, now_s)
            raise input_failed(effects.ended[0].cause or Cause("an input failed", call.call_id))
        session.add_call(call)
        self._after.homes[call] = session
        self._after.apply(session, effects, changed, now_s)
        if call in self._after.homes:
            self._after.holds.add(session, call, now_s)

    def prefer(self, session: Session, objective: Objective | None, now_s: float) -> None:
        """The client states an objective for all that the session makes. None changes nothing."""
        if objective is not None and objective is not session.objective:
            session.objective = objective
            session.record.write(Preferred(objective), now_s)
            self._after.marked(session, session.deductions.prefer(objective, session.calls), now_s)

    def entering(self, session: Session, now_s: float) -> AbstractContextManager[None]:
        """More of one program enters the session in the block. Calls that become ready in it run after it."""
        return self._after.entering(session, now_s)

    def start(self, call: HeldCall, now_s: float) -> None:
        session = self._after.homes.get(call)
        if session is not None:
            session.graph.start(call.call_id)  # it has no effects on others
            session.touch(now_s)

    def hold(self, call: HeldCall, size_bytes: int) -> None:
        """The call holds so many bytes now: its body, and its prompt if that is filled. Raises `ValueTooLargeError`."""
        session = self._after.homes.get(call)
        if session is None:
            return
        more_bytes = size_bytes - call.held_bytes
        problem = self.sessions.make_room(session, held_bytes=more_bytes) if more_bytes > 0 else None
        if problem is not None:
            raise problem
        call.held_bytes = size_bytes
        session.hold(more_bytes)

    def generated(self, call: HeldCall, text: str) -> None:
        """More text of the call's current output. Streaming getters receive it, unless the output has a transform.

        A text beyond the limits is given up: the variable will fail, and the call's client still gets its answer.
        """
        session = self._after.homes.get(call)
        if session is None or call.text_problem is not None:
            return
        size_bytes = utf8_bytes(text)
        call.text_problem = self.sessions.check_size(session, call.text.size_bytes + size_bytes, size_bytes)
        if call.text_problem is not None:
            session.hold(-call.forget_text())
            return
        call.text.add(text)
        session.hold(size_bytes)
        session.show_text(call)

    def begin_anew(self, call: HeldCall) -> None:
        """Discard the text of the call's current output: it will be generated again."""
        session = self._after.homes.get(call)
        if session is not None:
            call.text_problem = None
            session.hold(-call.forget_text())
            session.show_text(call)

    def attempt(self, call: HeldCall, now_s: float) -> None:
        """A running call is given to engines once more, for its current output."""
        call.attempts += 1
        session = self._after.homes.get(call)
        if session is not None and call.is_recorded:
            session.record.write(Started(call.call_id), now_s)

    def produce(
        self, call: HeldCall, value: str, now_s: float, *, was_cut: bool = False, answer: bytes | None = None
    ) -> None:
        """Set a running call's current output to its value. With its last one the call finishes.

        Raises `ValueTooLargeError`. `was_cut` says that the text ended at its length limit. `answer` is the body of the
        client's answer, for the record.
        """
        session, output = self._after.homes.get(call), call.output
        if session is None:
            return
        assert output is not None, "the graph and the call have the same outputs"
        text = str(call.text) if session.record.stores and output.transform is not None else None
        session.hold(-call.forget_text())
        size_bytes = utf8_bytes(value)
        problem = call.text_problem or self.sessions.check_size(session, size_bytes, size_bytes)
        if problem is not None:
            raise problem
        effects = session.graph.produce(call.call_id, output.variable)
        changed = session.deductions.apply(effects)
        begun_s = [session.made[name].begun_s for name in call.inputs if name in session.made]
        session.set_value(output.variable, value, size_bytes, Made(min((call.arrived_s, *begun_s)), was_cut))
        session.record.write(ValueSet(output.variable, value, call.call_id, text, was_cut, answer), now_s)
        call.produced += 1
        call.attempts = 0
        self._after.apply(session, effects, changed, now_s)

    def finish(self, call: HeldCall, now_s: float) -> None:
        """A running call without outputs has its answer. A call with outputs finishes with the last of them."""
        session = self._after.homes.get(call)
        if session is not None:
            effects = session.graph.finish(call.call_id)
            self._after.apply(session, effects, session.deductions.apply(effects), now_s)

    def fail(self, call: HeldCall, what: FailureCause | str, now_s: float) -> None:
        """A call failed because of `what`. Its owner reports the failure here, so it gets no callback."""
        session = self._after.homes.get(call)
        if session is not None:
            effects, changed = session.end_call(call, what, "failed", now_s)
            self._after.drop(call)
            self._after.apply(session, effects, changed, now_s)

    def leave(self, calls: Sequence[HeldCall], now_s: float) -> None:
        """One client of each of these calls has gone. Calls that nobody else waits for are cancelled.

        The client of a call with outputs may come back for them during a grace period, so the call goes on for it.
        """
        grace_s = self.sessions.limits.gone_grace_s
        now, later = list[HeldCall](), list[HeldCall]()
        for call in calls:
            may_return = bool(call.outputs and grace_s)
            call.leave(may_return=may_return)
            (later if may_return else now).append(call)
        self._after.cancel_unwanted(now, now_s)
        if later:
            self._at(now_s + grace_s, partial(self._after.forget_absent, later))

    def cancel(self, call: HeldCall, now_s: float, what: FailureCause | str = CANCELLED) -> None:
        """A client wants a call no more. The call and those that need its outputs fail, because of `what`."""
        session = self._after.homes.get(call)
        if session is not None:
            self._after.apply(session, *session.end_call(call, what, "cancelled", now_s), now_s)
