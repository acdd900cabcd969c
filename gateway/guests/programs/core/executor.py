"""The executor of semantic variables: runs each call of a session as soon as its inputs have values (Parrot, 5.1).

A synchronous core. Each event is a method call with its time (`now_s`, any monotonic clock), so that a simulator can
drive the executor in virtual time. The asyncio shells are in `gateway/guests/programs`.

Events: the sender, what changes first, and what is written to the session's log (`record.py`)
    open                client   a session begins, or its time to live (`sessions.py`) Opened, Kept
    add                 client   a call with its outputs; it may be skipped at once    Submitted; CallEnded
    set_value           client   a variable's value; calls may be skipped by it        ValueSet; CallEnded
    set_failed          client   a variable fails, also that of a refused call         VariableFailed
    get, release        client   a getter, and the objective that it asks for          nothing: the client asks again
    prefer              client   the session's objective                               Preferred
    leave               client   the number of a call's waiting clients                nothing: a restart drops clients
    cancel              client   a call ends                                           CallEnded
    close               client   the session takes no more calls and values            Closed
    delete              client   the session ends                                      Refused, and the stream ends
    start               owner    a ready call runs                                     nothing: it runs again
    attempt             owner    the number of attempts for the current output         Started
    hold                owner    the bytes of the call's prompt                        nothing
    generated           owner    the text of the current output grows                  nothing: it is generated again
    begin_anew          owner    that text is discarded, to be generated again         nothing
    produce             owner    that output's value; with the last one the call ends  ValueSet; CallEnded
    finish              owner    a call without outputs ends                           nothing: no such call is kept
    fail                owner    a call ends, and its outputs fail                     CallEnded
    expire              timer    sessions end; calls that waited too long end          the stream ends; CallEnded
    A call's owner is the shell that runs it. A timer event was scheduled with `At`, or is the periodic `expire`.
    Consequences that follow by rule are not in the log: `replay` sends the same events to a new executor.

Order of changes
    First the graph (`policy/programs/request_graph.py`), which returns the affected variables, calls and getters
    (`Effects`). Then the deduced objectives (`policy/programs/objectives.py`). Then the session, by its own methods:
    values, calls, getters, bytes. An event beyond a limit raises before anything has changed. An event of an ended
    call or session changes nothing: the shell may have sent it before it learned of the end.

Order of callbacks
    Callbacks run after all state is up to date (`Consequences.apply`), because they may call the executor again:
    getters of a variable that was set or failed; owners of calls that were ended by others (`on_broken`); owners of
    calls that became ready (`on_ready`) or whose objectives changed (`on_refined`). A call that is ready before the
    rest of its program has arrived waits for the rest (`Gathering`). An event with many callbacks runs some at once and
    the others in later iterations of the event loop (`Continuations`).

Ends
    A call ends with its last output, when it fails, when an input fails, when its condition does not hold, when
    no client, getter or consumer waits for it any more, or with its session. The consumers of its unset outputs end
    with it. A variable keeps its producer for ever, unless the variable fails. A session ends when it is deleted, when
    it was idle for its time to live, or when its tenant's limits need the room (`sessions.py`).

Ownership
    Each field of a session or a call is written by one module only, nearly always `session.py`
    or `held_call.py`. The graph owns the states of calls and variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from plait.backends.errors import PlaitError, SessionEndedError
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.guests.programs.core.consequences import Consequences, Job, Prediction
from plait.gateway.guests.programs.core.held_call import HeldCall, Made, utf8_bytes
from plait.gateway.guests.programs.core.record import Closed, Preferred, Records, Started, ValueSet, VariableFailed
from plait.gateway.guests.programs.core.session import Getter, Session, timed_by
from plait.gateway.guests.programs.core.session_errors import (
    CANCELLED,
    FailureCause,
    input_failed,
    nobody_produces,
    not_computed,
    refused,
    session_closed,
    variable_failed,
)
from plait.gateway.guests.programs.core.sessions import Sessions, Unproduced, unproduced, waits_for_client
from plait.gateway.timed_events import At
from plait.policy.programs.request_graph import CLIENT
from plait.policy.programs.request_graph_state import Cause, GraphError
from plait.policy.types import Objective


class Variables:
    """The part of the executor through which clients set variables and getters wait for them."""

    def __init__(self, sessions: Sessions, consequences: Consequences) -> None:
        self.counts = consequences.variables  # numbers of variables "set", "failed" and "skipped" so far
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
        """Fail a variable for a client that could not compute it, or for a refused call; `where` names which.

        A later call may produce it. Raises `ConflictError` if it has a producer, `LimitError` beyond tenant limits.
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
        """Add a getter. It is answered at once if the variable is set or failed. The variable may be unknown so far."""
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
    """The part of the executor that ends sessions, and calls and getters that wait in vain."""

    def __init__(self, sessions: Sessions, variables: Variables, consequences: Consequences) -> None:
        self._sessions = sessions
        self._variables = variables
        self._after = consequences

    def close(self, session: Session, now_s: float) -> None:
        """The client sends no more calls and values. Calls and getters of variables without a producer fail now."""
        session.closed = True
        session.record.write(Closed(), now_s)
        waiting: list[HeldCall | Getter] = list(session.calls.values())
        waiting += [getter for getters in session.getters.values() for getter in getters]
        for waiter in waiting:
            variable = None if session.ended else unproduced(session, waiter)
            if variable is not None:
                self._give_up(Unproduced(session, waiter, variable), now_s)

    def wait_for_client(self, session: Session, step: HeldCall, now_s: float) -> None:
        """The inputs of a native step have values: its client has to compute the output in time, or the step fails.

        The step fails at once in a closed session, which takes no more values.
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
        """End a session: fail its calls and getters, and free its memory. `why` continues "The session ..."."""
        if session.ended:
            return
        error = SessionEndedError(f"The session '{session.session_id}' {why}.") if isinstance(why, str) else why
        calls, getters = self._sessions.end(session, error)
        self._after.lose(calls, getters)
        self._after.continuations.each(calls, lambda call: call.owner.on_broken(error), now_s)
        for getter in getters:
            getter.on_failed(error)

    def end_all(self, why: str, now_s: float) -> None:
        """End every session. All callbacks have run when this returns."""
        for session in list(self._sessions):
            self.end(session, why, now_s)
        self._after.continuations.finish(now_s)

    def expire(self, now_s: float) -> int:
        """End the sessions past their time to live, and return how many. Called periodically.

        Fails calls and getters that have waited too long for a variable without a producer.
        """
        for waiting in self._after.holds.overdue(now_s):
            self._give_up(waiting, now_s)
        expired = self._sessions.idle(now_s)
        for session in expired:
            self.end(session, "has expired", now_s)
        return len(expired)

    def _give_up(self, waiting: Unproduced, now_s: float) -> None:
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
    """Runs the calls of all sessions (see the module's docstring).

    `predicted_s` predicts the duration of a call, from which its share of a JCT follows. `at` schedules an event.
    `on_job` is called with each value that a getter waited for. `records` is the log; None: in memory only. `is_own` is
    as in `Sessions`.
    """

    def __init__(
        self,
        limits: SessionsConfig,
        predicted_s: Prediction,
        at: At,
        on_job: Callable[[Job], None] = lambda _: None,
        records: Records | None = None,
        *,
        is_own: Callable[[str, str], bool] = lambda _tenant, _session_id: True,
    ) -> None:
        self.sessions = Sessions(limits, records, is_own)
        self._after = Consequences(predicted_s, limits.gather_ms / 1e3, limits.hold_timeout_s, at, on_job)
        self._at = at
        self.variables = Variables(self.sessions, self._after)
        self.endings = Endings(self.sessions, self.variables, self._after)

    # Events of a call.

    def add(self, session: Session, call: HeldCall, now_s: float) -> None:
        """Add a call. Its owner's `on_ready` is called once all inputs have values, possibly before this returns.

        An output may be a variable that failed before; its failure is forgotten. Raises `ConflictError` for a second
        producer, a cycle or a closed session, `LimitError` or `ValueTooLargeError` beyond the tenant's limits, and
        `FailedDependencyError` if an input has failed.
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
        """Set the objective of all that the session produces. None changes nothing."""
        if objective is not None and objective is not session.objective:
            session.objective = objective
            session.record.write(Preferred(objective), now_s)
            self._after.marked(session, session.deductions.prefer(objective, session.calls), now_s)

    def entering(self, session: Session, now_s: float) -> AbstractContextManager[None]:
        """Enter a part of a program in the block. Calls that become ready in it run after it."""
        return self._after.entering(session, now_s)

    def start(self, call: HeldCall, now_s: float) -> None:
        session = self._after.homes.get(call)
        if session is not None:
            session.graph.start(call.call_id)  # affects no other call, so there is nothing to apply
            session.touch(now_s)

    def hold(self, call: HeldCall, size_bytes: int) -> None:
        """Set the bytes that the call counts for: its body and its filled prompt. Raises `ValueTooLargeError`."""
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
        """Add to the text of the call's current output. Streaming getters get it, unless the output has a transform.

        A text beyond the limits is discarded: the variable will fail, but the call's client still gets its answer.
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
        """Discard the text of the call's current output, because a retry generates it again."""
        session = self._after.homes.get(call)
        if session is not None:
            call.text_problem = None
            session.hold(-call.forget_text())
            session.show_text(call)

    def attempt(self, call: HeldCall, now_s: float) -> None:
        """Count an attempt to generate the current output."""
        call.attempts += 1
        session = self._after.homes.get(call)
        if session is not None and call.is_recorded:
            session.record.write(Started(call.call_id), now_s)

    def produce(
        self, call: HeldCall, value: str, now_s: float, *, was_cut: bool = False, answer: bytes | None = None
    ) -> None:
        """Set the value of a running call's current output. The call finishes with its last output.

        `was_cut`: the text ended at the output limit. `answer` is the body of the client's answer, for the log. Raises
        `ValueTooLargeError`.
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
        """End a running call without outputs. A call with outputs ends by its last `produce`."""
        session = self._after.homes.get(call)
        if session is not None:
            effects = session.graph.finish(call.call_id)
            self._after.apply(session, effects, session.deductions.apply(effects), now_s)

    def fail(self, call: HeldCall, what: FailureCause | str, now_s: float) -> None:
        """Fail a call because of `what`. Its owner calls this, so the owner gets no `on_broken`."""
        session = self._after.homes.get(call)
        if session is not None:
            effects, changed = session.end_call(call, what, "failed", now_s)
            self._after.drop(call)
            self._after.apply(session, effects, changed, now_s)

    def leave(self, calls: Sequence[HeldCall], now_s: float) -> None:
        """One client of each of these calls has disconnected. Calls that nobody else waits for are cancelled.

        A call with outputs goes on for a grace period, in which the client may reconnect and get them.
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
        """Cancel a call for a client. The call and the consumers of its unset outputs fail because of `what`."""
        session = self._after.homes.get(call)
        if session is not None:
            self._after.apply(session, *session.end_call(call, what, "cancelled", now_s), now_s)
