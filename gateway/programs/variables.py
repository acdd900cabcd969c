"""The variables of sessions: clients set them, getters wait for them."""

from __future__ import annotations

from plait.gateway.programs.consequences import Consequences
from plait.gateway.programs.growing_text import utf8_bytes
from plait.gateway.programs.promises import timed_by
from plait.gateway.programs.session import Getter, Session
from plait.gateway.programs.session_errors import FailureCause, refused, session_closed, variable_failed
from plait.gateway.programs.sessions import Sessions
from plait.policy.programs.request_graph import CLIENT
from plait.policy.programs.request_graph_state import GraphError


class Variables:
    """The part of the executor through which clients set and get variables."""

    def __init__(self, sessions: Sessions, consequences: Consequences) -> None:
        self._sessions = sessions
        self._after = consequences

    @property
    def set_so_far(self) -> int:
        """How many variables have got a value."""
        return self._after.variables["set"]

    @property
    def failed_so_far(self) -> int:
        """How many variables have failed."""
        return self._after.variables["failed"]

    @property
    def skipped_so_far(self) -> int:
        """How many variables were skipped: a condition of a call did not hold."""
        return self._after.variables["skipped"]

    def set_value(self, session: Session, variable: str, value: str, now_s: float) -> None:
        """Set a variable's value for a client. Raises `ConflictError` if it has a producer, `LimitError` or
        `ValueTooLargeError` beyond the tenant's limits.
        """
        if session.closed:
            raise session_closed(session.session_id)
        size_bytes = utf8_bytes(value)
        new = variable not in session.outputs and session.graph.view.variable_state(variable) is None
        problem = self._sessions.check_size(session, size_bytes, size_bytes)
        problem = problem or self._sessions.make_room(session, variables=int(new))
        if problem is not None:
            raise problem
        session.forget_failed((), [variable])
        try:
            effects = session.graph.set_value(variable)
        except GraphError as error:
            raise refused(error) from error
        session.set_value(variable, value, size_bytes, made=None)
        self._after.apply(session, effects, now_s)

    def set_failed(
        self, session: Session, variable: str, what: FailureCause, now_s: float, where: str = CLIENT
    ) -> None:
        """Fail a variable, for `where`: a client that could not compute it, or a call that was refused.

        It may be produced again. Raises `ConflictError` if it has a producer, `LimitError` beyond the tenant's limits.
        """
        new = variable not in session.outputs and session.graph.view.variable_state(variable) is None
        problem = self._sessions.make_room(session, variables=int(new))
        if problem is not None:
            raise problem
        session.forget_failed((), [variable])
        try:
            effects = session.graph.refuse(where, [variable], what)
        except GraphError as error:
            raise refused(error) from error
        self._after.apply(session, effects, now_s)

    def get(self, session: Session, getter: Getter, now_s: float) -> None:
        """Add a getter. If the variable is set or failed, the getter is answered at once. It may be unknown so far."""
        session.touch(now_s)
        variable = getter.variable
        if variable in session.values:
            getter.on_value(session.values[variable])
            return
        cause = session.graph.view.cause(variable)
        if cause is not None:
            getter.on_failed(variable_failed(variable, cause))
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
