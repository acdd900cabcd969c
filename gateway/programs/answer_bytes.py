"""The bytes that one chained call's answer holds. They count against its tenant from the moment at which they come."""

from __future__ import annotations

from plait.backends.errors import LimitError
from plait.gateway.programs.session import Session
from plait.gateway.programs.sessions import Sessions


class AnswerBytes:
    """One answer's part of the bytes that a tenant's sessions hold. Once the session has ended nothing counts."""

    __slots__ = ("_session", "_sessions")

    def __init__(self, sessions: Sessions, session: Session) -> None:
        self._sessions = sessions
        self._session = session

    def keep(self, size_bytes: int) -> bool:
        """Whether this much more may be kept for a repeated request. If so, it counts.

        It may if the tenant's sessions then hold at most half of `max_held_bytes`.
        """
        session = self._session
        if session.ended or session.tenant.held_bytes + size_bytes > self._sessions.limits.max_held_bytes // 2:
            return False
        session.hold(size_bytes, is_answer=True)
        return True

    def hold(self, size_bytes: int) -> None:
        """Count this much more, for a client that is about to read it. Raises `LimitError` beyond the limit."""
        session = self._session
        if session.ended:
            return
        if self._sessions.make_room(session, held_bytes=size_bytes) is not None:
            limit = self._sessions.limits.max_held_bytes
            message = (
                f"The answer was ended: the tenant's sessions hold {limit:,} bytes, which is the limit. Read answers "
                "faster, make fewer calls at once, or end sessions that are not needed; then send the call again."
            )
            raise LimitError(message, code="too_many_held_bytes", retry_after_s=1.0)
        session.hold(size_bytes, is_answer=True)

    def free(self, size_bytes: int) -> None:
        """Count this much less."""
        if not self._session.ended:
            self._session.hold(-size_bytes, is_answer=True)
