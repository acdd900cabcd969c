"""Sessions: their tenants, contents, limits and time to live.

Synchronous. The time is an argument: the gateway's clock or a simulator's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from plait.backends.errors import NotFoundError, PlaitError, ValueTooLargeError
from plait.gateway.config import SessionsConfig
from plait.gateway.programs.getter import Getter
from plait.gateway.programs.held_call import HeldCall, Made
from plait.gateway.programs.session_errors import too_many
from plait.policy.programs.objectives import Deductions
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import CallState, VariableState


@dataclass(slots=True, eq=False)
class Tenant:
    """The sessions of one API key, and totals over them."""

    name: str
    sessions: dict[str, Session] = field(default_factory=dict)
    variables: int = 0
    waiting_calls: int = 0
    held_bytes: int = 0


class Session:
    """One session: its graph, the deductions from it, and the texts.

    `calls` holds the calls that have not ended, by id. `outputs` maps each variable with a producer to the call that
    produces or produced it (None: the client set it, or it failed); a repeated call is recognised by it. `getters`
    holds the getters of each variable that is awaited. `made` says how each value that a call produced was made.
    """

    __slots__ = (
        "_held_bytes", "_variables", "_waiting_calls", "calls", "created_s", "deductions", "due_s", "ended", "getters",
        "graph", "made", "outputs", "session_id", "tenant", "touched_s", "ttl_s", "values",
    )  # fmt: skip

    def __init__(self, tenant: Tenant, session_id: str, ttl_s: float, now_s: float) -> None:
        self.tenant = tenant
        self.session_id = session_id
        self.ttl_s = ttl_s
        self.created_s = self.touched_s = now_s
        self.due_s = float("inf")  # when to check next whether the session has expired
        self.ended = False
        self.graph = RequestGraph()
        self.deductions = Deductions(self.graph.view, self._predicted_s)
        self.calls: dict[str, HeldCall] = {}
        self.outputs: dict[str, HeldCall | None] = {}
        self.values: dict[str, str] = {}
        self.made: dict[str, Made] = {}
        self.getters: dict[str, list[Getter]] = {}
        self._variables = self._waiting_calls = self._held_bytes = 0

    def __repr__(self) -> str:
        return f"Session({self.session_id!r}, {self.graph!r}, values={len(self.values)})"

    @property
    def expires_s(self) -> float:
        """When the session expires if nothing happens in it before."""
        return self.touched_s + self.ttl_s

    @property
    def active(self) -> bool:
        """Whether a call is ready or running, or a getter waits. An active session does not expire."""
        return bool(self.getters or self.graph.view.ready_calls or self.graph.view.running_calls)

    def was_cut(self, variable: str) -> bool:
        """Whether the variable's text ended at its length limit."""
        return variable in self.made and self.made[variable].was_cut

    def state_of(self, variable: str) -> VariableState:
        """A variable's state. An unknown variable is empty."""
        return self.graph.view.variable_state(variable) or VariableState.EMPTY

    def variables(self) -> Iterator[str]:
        """The variables with a producer, then the other inputs of calls that have not ended."""
        yield from self.outputs
        awaited = dict.fromkeys(name for call in self.calls.values() for name in call.inputs)
        yield from (name for name in awaited if name not in self.outputs)

    def unused_id(self, call_id: str) -> str:
        """`call_id`, with a number appended if another call that has not ended has that id."""
        if call_id not in self.calls:
            return call_id
        return next(numbered for n in count(2) if (numbered := f"{call_id}-{n}") not in self.calls)

    def forget_failed(self, inputs: Iterable[str], outputs: Sequence[str]) -> None:
        """Forget the failed variables among a new call's `outputs`, so that the call can produce them again.

        Does nothing if the call would be refused anyway: another output has a producer, an output is named twice, or
        a failed output is also an input.
        """
        failed = {name for name in outputs if self.state_of(name) is VariableState.FAILED}
        others = [self.graph.view.producer(name) for name in outputs if name not in failed]
        if len(failed) + len(others) == len(outputs) and not any(others) and failed.isdisjoint(inputs):
            for name in failed:
                self.graph.forget(name)
                del self.outputs[name]

    def account(self, more_bytes: int = 0) -> None:
        """Update the tenant's totals. The held texts and bodies have grown by `more_bytes`."""
        view, tenant = self.graph.view, self.tenant
        tenant.variables += view.variables - self._variables
        tenant.waiting_calls += view.waiting_calls - self._waiting_calls
        tenant.held_bytes += more_bytes
        self._variables, self._waiting_calls = view.variables, view.waiting_calls
        self._held_bytes += more_bytes

    def start_clocks(self) -> None:
        """Start the JCT clock of each getter whose variable now has a producer.

        The JCT counts from the first arrival among the unfinished calls that the variable needs.
        """
        for variable, waiting in self.getters.items():
            getters = [getter for getter in waiting if getter.jct_s is not None and getter.since_s is None]
            if getters and self.state_of(variable) is VariableState.PENDING:
                since_s = min(self.calls[call_id].arrived_s for call_id in self.deductions.paths.upstream(variable))
                for getter in getters:
                    getter.since_s = since_s

    def end(self) -> tuple[list[HeldCall], list[Getter]]:
        """Remove the session from its tenant and forget its contents; returns its calls and getters."""
        self.tenant.variables -= self._variables
        self.tenant.waiting_calls -= self._waiting_calls
        self.tenant.held_bytes -= self._held_bytes
        del self.tenant.sessions[self.session_id]
        concerned = list(self.calls.values()), [getter for waiting in self.getters.values() for getter in waiting]
        for texts in (self.calls, self.outputs, self.values, self.getters):
            texts.clear()
        self.graph = RequestGraph()
        self.deductions = Deductions(self.graph.view, self._predicted_s)
        self.ended = True
        return concerned

    def _predicted_s(self, call_id: str) -> float:
        return self.calls[call_id].predicted_s

    def check(self) -> None:
        """Assert the invariants; for tests."""
        view = self.graph.view
        self.graph.check()
        self.deductions.check()
        assert (self._variables, self._waiting_calls) == (view.variables, view.waiting_calls)
        assert all(call_id in view for call_id in self.calls)
        counts = (view.waiting_calls, view.ready_calls, view.running_calls)
        assert sum(counts) == len(self.calls)
        assert all(self.state_of(name) is VariableState.SET for name in self.values)
        assert all(view.producer(name) is not None for name in self.outputs)
        for name, getters in self.getters.items():
            assert getters
            assert self.state_of(name) in {VariableState.EMPTY, VariableState.PENDING}
        for call in self.calls.values():
            assert call.ready_s is not None or view.call_state(call.call_id) is CallState.WAITING


class Sessions:
    """The sessions of all tenants, by tenant and id."""

    def __init__(self, limits: SessionsConfig) -> None:
        self.limits = limits
        self.tenants: dict[str, Tenant] = {}
        self._due: list[tuple[float, int, Session]] = []  # a heap; some entries are outdated
        self._order = count()
        self._count = 0

    def open(self, tenant: str, session_id: str, now_s: float, ttl_s: float | None = None) -> Session:
        """The tenant's session of this id; created if there is none. `ttl_s` replaces its time to live."""
        owner = self.tenants.get(tenant) or Tenant(tenant)
        session = owner.sessions.get(session_id)
        if session is None:
            if len(owner.sessions) >= self.limits.max_sessions:
                raise too_many("sessions", self.limits.max_sessions, "too_many_sessions")
            session = Session(owner, session_id, ttl_s or self.limits.ttl_s, now_s)
            self.tenants[tenant] = owner
            owner.sessions[session_id] = session
            self._count += 1
        session.touched_s = now_s
        session.ttl_s = ttl_s or session.ttl_s
        if session.expires_s < session.due_s:
            self._watch(session)
        return session

    def find(self, tenant: str, session_id: str, now_s: float) -> Session:
        """The tenant's session of this id; raises `NotFoundError`."""
        owner = self.tenants.get(tenant)
        session = None if owner is None else owner.sessions.get(session_id)
        if session is None:
            raise NotFoundError(
                f"There is no session '{session_id}': it was never made, was deleted, or has expired. Make a new one.",
                code="session_not_found",
                param="session_id",
            )
        session.touched_s = now_s
        return session

    def end(self, session: Session) -> tuple[list[HeldCall], list[Getter]]:
        """Forget a session; returns its calls and getters."""
        concerned = session.end()
        self._count -= 1
        if not session.tenant.sessions:
            del self.tenants[session.tenant.name]
        if len(self._due) > 2 * self._count + 64:
            self._due = [entry for entry in self._due if not entry[2].ended]
            heapq.heapify(self._due)
        return concerned

    def idle(self, now_s: float) -> list[Session]:
        """The sessions that expire now. Each session is checked about once in its time to live."""
        expired = []
        while self._due and self._due[0][0] <= now_s:
            due_s, _, session = heapq.heappop(self._due)
            if session.ended or due_s != session.due_s:
                continue
            if session.active:
                session.touched_s = now_s
            if session.expires_s > now_s:
                self._watch(session)
            else:
                expired.append(session)
        return expired

    def check_room(
        self, session: Session, *, variables: int = 0, waiting_calls: int = 0, held_bytes: int = 0
    ) -> PlaitError | None:
        """The error if this much more would exceed the tenant's limits; None if it would not."""
        limits, tenant = self.limits, session.tenant
        if variables and tenant.variables + variables > limits.max_variables:
            return too_many("semantic variables", limits.max_variables, "too_many_variables")
        if waiting_calls and tenant.waiting_calls + waiting_calls > limits.max_waiting_calls:
            return too_many("waiting calls", limits.max_waiting_calls, "too_many_waiting_calls")
        if tenant.held_bytes + held_bytes > limits.max_held_bytes:
            return ValueTooLargeError(
                f"{held_bytes:,} more bytes would exceed the {limits.max_held_bytes:,} bytes of values, calls and "
                "answers that a tenant's sessions may hold; end sessions that are not needed any more."
            )
        return None

    def check_call(self, session: Session, call: HeldCall, outputs: Iterable[str]) -> None:
        """Raise if the tenant's limits do not allow a call that produces `outputs`."""
        states = [session.graph.view.variable_state(name) for name in call.inputs]
        problem = self.check_room(
            session,
            variables=states.count(None) + sum(session.graph.view.variable_state(name) is None for name in outputs),
            waiting_calls=int(any(state is not VariableState.SET for state in states)),
            held_bytes=call.held_bytes,
        )
        if problem is not None:
            raise problem

    def check_value(self, session: Session, value: str) -> tuple[int, PlaitError | None]:
        """A value's length in bytes of UTF-8, and the error if the limits do not allow it."""
        size_bytes = len(value) if value.isascii() else len(value.encode())
        if size_bytes > self.limits.max_value_bytes:
            message = f"The value has {size_bytes:,} bytes; at most {self.limits.max_value_bytes:,} are allowed."
            return size_bytes, ValueTooLargeError(message)
        return size_bytes, self.check_room(session, held_bytes=size_bytes)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Session]:
        return (session for tenant in self.tenants.values() for session in tenant.sessions.values())

    def _watch(self, session: Session) -> None:
        session.due_s = session.expires_s
        heapq.heappush(self._due, (session.due_s, next(self._order), session))

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for tenant in self.tenants.values():
            assert tenant.sessions, "a tenant without sessions was left behind"
            sessions = tenant.sessions.values()
            assert tenant.variables == sum(session.graph.view.variables for session in sessions)
            assert tenant.waiting_calls == sum(session.graph.view.waiting_calls for session in sessions)
            texts = sum(len(text.encode()) for session in sessions for text in session.values.values())
            bodies = sum(call.held_bytes for session in sessions for call in session.calls.values())
            assert tenant.held_bytes >= texts + bodies, "answers kept for repeated requests count too"
        assert self._count == len(list(self)) == len({id(entry[2]) for entry in self._due if not entry[2].ended})
        for session in self:
            session.check()
