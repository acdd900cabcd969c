"""The sessions of all tenants: limits, time to live, and the eviction of idle sessions when a tenant needs room.

A call or getter of a variable without a producer has a time limit of its own (`Holds`). The ids of deleted sessions are
refused for a while, so that a late call does not create the session again. Synchronous; times are arguments.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple
from uuid import uuid4

from plait.backends.errors import NotFoundError, PlaitError, SessionEndedError, ValueTooLargeError
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.guests.programs.core.held_call import HeldCall
from plait.gateway.guests.programs.core.record import Records
from plait.gateway.guests.programs.core.session import Getter, Session, Tenant
from plait.gateway.guests.programs.core.session_errors import too_many
from plait.policy.programs.request_graph_state import CallState, VariableState


@dataclass(slots=True)
class _Ids:
    """One tenant's refused ids."""

    until_s: dict[str, float] = field(default_factory=dict)
    """By id: when the refusal ends."""
    heap: list[tuple[float, str]] = field(default_factory=list)
    """The same as a heap, the earliest end first."""


class DeletedSessions:
    """Refuses the ids of deleted sessions, at most `limit` for each tenant: the refusals that end first give way."""

    def __init__(self, limit: int, on_forgotten: Callable[[str, str], None] = lambda *_: None) -> None:
        self._limit = limit
        self._on_forgotten = on_forgotten
        self._tenants: dict[str, _Ids] = {}

    def add(self, tenant: str, session_id: str, now_s: float, until_s: float) -> None:
        self._forget(tenant, now_s)
        ids = self._tenants.setdefault(tenant, _Ids())
        ids.until_s[session_id] = until_s
        heapq.heappush(ids.heap, (until_s, session_id))
        if len(ids.heap) > self._limit:
            self._drop(tenant, ids)

    def check(self, tenant: str, session_id: str, now_s: float) -> None:
        """Raise `SessionEndedError` if the id is refused."""
        ids = self._tenants.get(tenant)
        if ids is not None and ids.until_s.get(session_id, now_s) > now_s:
            message = f"The session '{session_id}' was deleted. Make a new session, under another id."
            raise SessionEndedError(message, param="session_id")

    def expire(self, now_s: float) -> None:
        for tenant in list(self._tenants):
            self._forget(tenant, now_s)

    def __len__(self) -> int:
        return sum(len(ids.heap) for ids in self._tenants.values())

    def _forget(self, tenant: str, now_s: float) -> None:
        ids = self._tenants.get(tenant)
        while ids is not None and ids.heap and ids.heap[0][0] <= now_s:
            self._drop(tenant, ids)
        if ids is not None and not ids.heap:
            del self._tenants[tenant]

    def _drop(self, tenant: str, ids: _Ids) -> None:
        session_id = heapq.heappop(ids.heap)[1]
        del ids.until_s[session_id]
        self._on_forgotten(tenant, session_id)


class Unproduced(NamedTuple):
    """A call or getter whose `variable` has no producer. For a native step it is the output, which its client owes."""

    session: Session
    waiter: HeldCall | Getter
    variable: str


class Holds:
    """Time limits of calls and getters that wait for a variable without a producer, and of ready native steps.

    Each may wait `timeout_s`. A variable that has got a producer keeps it, so its waiters have no limit any more.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._due: OrderedDict[HeldCall | Getter, tuple[float, Session]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, session: Session, waiter: HeldCall | Getter, now_s: float) -> None:
        """Start the time limit of a waiter, unless each of its variables has a producer."""
        self.drop(waiter)  # a native step is added twice: for its inputs, and then for its client
        if unproduced(session, waiter) is not None:
            self._due[waiter] = now_s + self._timeout_s, session

    def drop(self, waiter: HeldCall | Getter) -> None:
        self._due.pop(waiter, None)

    def overdue(self, now_s: float) -> list[Unproduced]:
        """Remove the waiters whose time is over. Returns those that still have a variable without a producer."""
        found = []
        while self._due:
            waiter, (due_s, session) = next(iter(self._due.items()))
            if due_s > now_s:
                break
            del self._due[waiter]
            variable = unproduced(session, waiter)
            if variable is not None:
                found.append(Unproduced(session, waiter, variable))
        return found


def unproduced(session: Session, waiter: HeldCall | Getter) -> str | None:
    """The first variable without a producer that `waiter` waits for; None if each has one.

    For a ready native step, this is its own output, which its client has to set.
    """
    if isinstance(waiter, Getter):
        names: tuple[str, ...] = (waiter.variable,)
    elif waits_for_client(session, waiter):
        return waiter.outputs[0].variable
    else:
        names = waiter.inputs
    return next((name for name in names if session.state_of(name) is VariableState.EMPTY), None)


def waits_for_client(session: Session, call: HeldCall) -> bool:
    """Whether a call is a native step whose inputs have values."""
    return call.is_native and session.graph.call_state(call.call_id) is CallState.READY


def stranded(session: Session) -> tuple[list[HeldCall], list[Getter]]:
    """The calls and getters that wait for a client's request, which a stopping gateway does not take.

    They depend on a variable without a producer, or on a native step.
    """
    graph, lost = session.graph, dict[str, HeldCall]()

    def never_comes(variable: str) -> bool:
        producer = graph.producer(variable)
        return variable not in session.values and (producer is None or producer in lost)

    for node in sorted(graph.calls.values(), key=lambda node: node.rank):  # producers have lower ranks
        call = session.calls[node.call_id]
        if call.is_native or any(map(never_comes, call.inputs)):
            lost[call.call_id] = call
    waiting = [getter for variable, getters in session.getters.items() if never_comes(variable) for getter in getters]
    return list(lost.values()), waiting


class Sessions:
    """The sessions of all tenants. `records` is their log.

    `evicted` counts evictions by what the tenant needed: `sessions`, `variables` or `bytes`. `is_own` says whether this
    gateway, of several that divide the ids, may create a tenant's session with an id.
    """

    def __init__(
        self,
        limits: SessionsConfig,
        records: Records | None = None,
        is_own: Callable[[str, str], bool] = lambda _tenant, _session_id: True,
    ) -> None:
        self.limits = limits
        self._records = records or Records()
        self.tenants: dict[str, Tenant] = {}
        self.deleted = DeletedSessions(limits.max_sessions, self._records.forgotten)
        self.evicted: Counter[str] = Counter()
        self._due: list[tuple[float, int, Session]] = []  # a heap of expiry checks; only `Session.due_s` is valid
        self._order = count()
        self._count = 0
        self.is_own = is_own

    def new_id(self, tenant: str) -> str:
        """A new session's id, chosen so that the session belongs to this gateway."""
        while True:
            session_id = f"s-{uuid4().hex}"
            if self.is_own(tenant, session_id):
                return session_id

    def open(
        self, tenant: str, session_id: str, now_s: float, ttl_s: float | None = None, *, durable: bool = True
    ) -> Session:
        """The tenant's session with this id, created if there is none. `ttl_s` replaces its time to live.

        `durable` counts for a new session. Raises `SessionEndedError` for a deleted session, `LimitError` if the tenant
        has too many sessions that are not idle, and what the records raise.
        """
        self._records.check()
        self._records.make(tenant, session_id)
        owner = self.tenants.get(tenant) or Tenant(tenant)
        session = owner.sessions.get(session_id)
        if session is None:
            self.deleted.check(tenant, session_id, now_s)
            missing = len(owner.sessions) + 1 - self.limits.max_sessions
            if missing > 0 and not self._evict(owner, None, missing, lambda _: 1, "sessions"):
                raise too_many("sessions", self.limits.max_sessions, "too_many_sessions")
            record = self._records.new(tenant, session_id, durable=durable)
            session = self.restore(tenant, session_id, now_s, ttl_s or self.limits.ttl_s)
            session.record_in(record)
            record.opened(session.ttl_s, now_s)
        session.touch(now_s)
        if ttl_s:
            session.live_for(ttl_s)
        session.record.touched(session.ttl_s, now_s)
        if session.expires_s < session.due_s:
            self._watch(session)
        return session

    def restore(self, tenant: str, session_id: str, now_s: float, ttl_s: float) -> Session:
        """Create a session that is not in memory: a new one, or one for a replay to fill."""
        owner = self.tenants.setdefault(tenant, Tenant(tenant))
        session = owner.sessions[session_id] = Session(owner, session_id, ttl_s, now_s)
        self._count += 1
        self._watch(session)
        return session

    def find(self, tenant: str, session_id: str, now_s: float) -> Session:
        """The tenant's session with this id. Raises `NotFoundError`, `SessionEndedError`, or the log's error."""
        self._records.check()
        session = self.label(tenant, session_id, now_s)
        if session is None:
            raise NotFoundError(
                f"There is no session '{session_id}': it was never made, has expired, or was evicted because its tenant"
                " needed room. Make a new one.",
                code="session_not_found",
                param="session_id",
            )
        return session

    def has(self, tenant: str, session_id: str) -> bool:
        return tenant in self.tenants and session_id in self.tenants[tenant].sessions

    def label(self, tenant: str, session_id: str, now_s: float) -> Session | None:
        """The session that a call names without using its variables; None if there is none. Keeps it alive.

        Raises `SessionEndedError` for a deleted session.
        """
        self._records.make(tenant, session_id)
        owner = self.tenants.get(tenant)
        session = None if owner is None else owner.sessions.get(session_id)
        if session is None:
            self.deleted.check(tenant, session_id, now_s)
        else:
            session.touch(now_s)
        return session

    def end(self, session: Session, why: PlaitError) -> tuple[list[HeldCall], list[Getter]]:
        """Remove a session. Returns the calls and getters that it had."""
        session.record.ended()
        concerned = session.end(why)
        self._count -= 1
        if not session.tenant.sessions:
            del self.tenants[session.tenant.name]
        if len(self._due) > 2 * self._count + 64:
            self._due = [entry for entry in self._due if not entry[2].ended]
            heapq.heapify(self._due)
        return concerned

    def idle(self, now_s: float) -> list[Session]:
        """The sessions that have expired. A session is checked about once in its time to live, not at each `touch`."""
        self.deleted.expire(now_s)
        expired = []
        while self._due and self._due[0][0] <= now_s:
            due_s, _, session = heapq.heappop(self._due)
            if session.ended or due_s != session.due_s:
                continue
            if session.active:
                session.stay(now_s)
            if session.expires_s > now_s:
                self._watch(session)
            else:
                expired.append(session)
        return expired

    def make_room(
        self, session: Session, *, variables: int = 0, waiting_calls: int = 0, held_bytes: int = 0
    ) -> PlaitError | None:
        """Evict idle sessions of the tenant until its limits allow this much more. The error if that is not enough."""
        if session.has_room:
            return None
        limits, tenant = self.limits, session.tenant
        missing = tenant.variables + variables - limits.max_variables if variables else 0
        if missing > 0 and not self._evict(tenant, session, missing, _variables, "variables"):
            return too_many("semantic variables", limits.max_variables, "too_many_variables")
        if waiting_calls and tenant.waiting_calls + waiting_calls > limits.max_waiting_calls:
            return too_many("waiting calls", limits.max_waiting_calls, "too_many_waiting_calls")
        missing = tenant.held_bytes + held_bytes - limits.max_held_bytes
        if missing > 0 and not self._evict(tenant, session, missing, _held_bytes, "bytes"):
            return ValueTooLargeError(
                f"{held_bytes:,} more bytes would exceed the {limits.max_held_bytes:,} bytes of values, calls and "
                "answers that a tenant's sessions may hold; end sessions that are not needed any more."
            )
        return None

    def check_call(self, session: Session, call: HeldCall, outputs: Iterable[str]) -> None:
        """Raise if the tenant's limits do not allow a call that produces `outputs`."""
        known, new, waits = session.graph.variables, 0, False
        for name in call.inputs:
            node = known.get(name)
            new += node is None
            waits = waits or node is None or node.state is not VariableState.SET
        for name in outputs:
            new += name not in known
        problem = self.make_room(session, variables=new, waiting_calls=int(waits), held_bytes=call.held_bytes)
        if problem is not None:
            raise problem

    def check_size(self, session: Session, size_bytes: int, more_bytes: int) -> PlaitError | None:
        """The error if the limits do not allow a value of this size, of which `more_bytes` are not counted yet."""
        if size_bytes > self.limits.max_value_bytes and not session.has_room:
            message = (
                f"The value has {size_bytes:,} bytes or more; at most {self.limits.max_value_bytes:,} are allowed."
            )
            return ValueTooLargeError(message)
        return self.make_room(session, held_bytes=more_bytes)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Session]:
        return (session for tenant in self.tenants.values() for session in tenant.sessions.values())

    def _evict(
        self, tenant: Tenant, but: Session | None, missing: int, size: Callable[[Session], int], why: str
    ) -> bool:
        """Evict idle sessions, the least recently used first, until `missing` is free. False, and none, if too few."""
        victims, freed = [], 0
        for session in tenant.idle.values():
            if freed >= missing:
                break
            if session is not but:
                victims.append(session)
                freed += size(session)
        if freed < missing:
            return False
        for session in victims:
            self.end(session, SessionEndedError(f"The session '{session.session_id}' has given way to others."))
            self.evicted[why] += 1
        return True

    def _watch(self, session: Session) -> None:
        session.due_s = session.expires_s
        heapq.heappush(self._due, (session.due_s, next(self._order), session))


def _variables(session: Session) -> int:
    return len(session.graph.variables)


def _held_bytes(session: Session) -> int:
    return session.held_bytes
