"""Which sessions are evicted, against a list in the order of use: whatever opens, is named, runs, waits and ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import LimitError, SessionEndedError
from plait.gateway.guests.programs.core.held_call import HeldCall
from tests.gateway.guests.programs.core.session_calls import Core, Waiting
from tests.invariants import check

LIMIT = 3
WHAT = ("open", "open", "open", "label", "call", "leave", "get", "release", "delete")
STEPS = st.lists(st.tuples(st.sampled_from(WHAT), st.sampled_from("stuvwx")), min_size=20, max_size=60)


@dataclass
class Used:
    """What the oracle knows of a session."""

    calls: list[HeldCall] = field(default_factory=list)
    gets: list[Waiting] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return not (self.calls or self.gets)


class Oracle:
    """The sessions in the order of their last use, and the deleted ones."""

    def __init__(self) -> None:
        self.core = Core(max_sessions=LIMIT)
        self.sessions: dict[str, Used] = {}
        self.deleted: list[str] = []
        self.now_s = 0.0

    def use(self, name: str) -> bool:
        """Open a session or use it again, and expect the same; False if it is refused."""
        if name in self.deleted:
            with pytest.raises(SessionEndedError):
                self.core.session(name, now_s=self.now_s)
            return False
        idle = next((other for other, used in self.sessions.items() if used.is_idle), None)
        if name not in self.sessions and len(self.sessions) == LIMIT:
            if idle is None:
                with pytest.raises(LimitError):
                    self.core.session(name, now_s=self.now_s)
                return False
            del self.sessions[idle]
        self.core.session(name, now_s=self.now_s)
        self.sessions[name] = self.sessions.pop(name, Used())
        return True

    def step(self, what: str, name: str) -> None:
        self.now_s += 1.0
        used = self.sessions.get(name)
        executor = self.core.executor
        if what == "label" and name not in self.deleted:
            assert (executor.sessions.label("t", name, self.now_s) is None) == (used is None)
            if used is not None:
                self.sessions[name] = self.sessions.pop(name)
        elif what == "open":
            self.use(name)
        elif what in {"call", "get"} and self.use(name):
            self._begin(what, name)
        elif what in {"leave", "release"} and used is not None and (used.calls if what == "leave" else used.gets):
            self.sessions[name] = self.sessions.pop(name)
            if what == "leave":
                executor.leave([used.calls.pop()], self.now_s)
            else:
                session = executor.sessions.tenants["t"].sessions[name]
                executor.variables.release(session, used.gets.pop().getter, self.now_s)
        elif what == "delete" and used is not None:
            executor.endings.delete(executor.sessions.tenants["t"].sessions[name], self.now_s)
            self.deleted = [*self.deleted, name][-LIMIT:]
            del self.sessions[name]

    def _begin(self, what: str, name: str) -> None:
        session, used = self.core.session(name, now_s=self.now_s), self.sessions[name]
        if what == "call":
            call_id = f"c{self.now_s}"
            used.calls.append(self.core.add(call_id, "never", now_s=self.now_s, session=session, held_bytes=10))
        else:
            used.gets.append(Waiting("never"))
            self.core.executor.variables.get(session, used.gets[-1].getter, self.now_s)


@given(STEPS)
def test_the_idle_session_that_was_used_least_recently_goes_first(steps: list[tuple[str, str]]) -> None:
    oracle = Oracle()
    for what, name in steps:
        oracle.step(what, name)
        check(oracle.core.executor)
        assert {session.session_id for session in oracle.core.executor.sessions} == oracle.sessions.keys()
