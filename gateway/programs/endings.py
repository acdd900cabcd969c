"""The ends of sessions, and of calls, native steps and getters whose variable nobody produces."""

from __future__ import annotations

from plait.backends.errors import SessionEndedError
from plait.gateway.programs.consequences import Consequences
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.holds import Unproduced
from plait.gateway.programs.session import Getter, Session, unproduced, waits_for_client
from plait.gateway.programs.session_errors import nobody_produces, not_computed
from plait.gateway.programs.sessions import Sessions
from plait.gateway.programs.variables import Variables


class Endings:
    """The part of the executor that ends what would wait in vain, and sessions."""

    def __init__(self, sessions: Sessions, variables: Variables, consequences: Consequences) -> None:
        self._sessions = sessions
        self._variables = variables
        self._after = consequences

    def close(self, session: Session, now_s: float) -> None:
        """No more calls and values will come. Calls and getters that wait for what nobody produces fail now."""
        session.closed = True
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
        self._sessions.deleted.add(session.tenant.name, session.session_id, now_s, now_s + session.ttl_s)
        self.end(session, "was deleted", now_s)

    def end(self, session: Session, why: str, now_s: float) -> None:
        """End a session: fail its calls and getters, and free its memory."""
        if session.ended:
            return
        error = SessionEndedError(f"The session '{session.session_id}' {why}.")
        calls, getters = self._sessions.end(session)
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
            effects = session.graph.fail(waiter.call_id, error.causes[0])
            self._after.drop(waiter)
            self._after.apply(session, effects, now_s)
            waiter.owner.on_broken(error)
