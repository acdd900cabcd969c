"""A queue in which tenants share by tokens: start-time fair queueing (Goyal et al. 1996).

Each tenant has a virtual time, the tokens that it was served divided by its weight. The tenant that is furthest behind
goes next. A tenant that comes back after a pause begins at the time of the one served last: nobody saves up a share.
Deficit round robin has the same shares; here nobody waits for a quantum as large as the longest prompt.

Within a tenant, calls for throughput go last. Within a class, sessions take turns. Within a session, first come first
served.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True, eq=False)
class Ticket:
    """A call that wants to be placed. `tokens` is its prompt and expected output. `work_s` is the engine time of both.

    `session` is empty for a call without one. `number` is its place among all calls that waited.
    """

    tenant: str
    model: str
    tokens: int
    work_s: float = 0.0
    session: str = ""
    for_throughput: bool = False
    number: int = 0


Sessions = OrderedDict[str, deque[Ticket]]


@dataclass(slots=True)
class _Tenant:
    """The waiting calls of one tenant, urgent ones and those for throughput, by session. `served` is virtual time."""

    served: float = 0.0
    urgent: Sessions = field(default_factory=OrderedDict)
    throughput: Sessions = field(default_factory=OrderedDict)
    waiting: int = 0
    work_s: float = 0.0

    def of(self, ticket: Ticket) -> Sessions:
        return self.throughput if ticket.for_throughput else self.urgent

    def take(self) -> Ticket:
        """The next call. Its session goes to the end of the line."""
        sessions = self.urgent or self.throughput
        session, tickets = next(iter(sessions.items()))
        ticket = tickets.popleft()
        if tickets:
            sessions.move_to_end(session)
        else:
            del sessions[session]
        return ticket


class FairQueue:
    """The waiting calls of one model. `weights` are the tenants' shares (default 1). They may change at any time.

    `work_s` is the sum of the calls' work.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.work_s = 0.0
        self._weights = {} if weights is None else weights
        self._tenants: dict[str, _Tenant] = {}
        self._order: list[tuple[float, int, str]] = []  # a heap of the tenants that wait; stale entries are skipped
        self._turn = count()
        self._now = 0.0  # virtual time: that of the tenant served last
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Ticket]:
        for tenant in self._tenants.values():
            for sessions in (tenant.urgent, tenant.throughput):
                for tickets in sessions.values():
                    yield from tickets

    def waiting(self, tenant: str) -> int:
        """How many calls of a tenant wait."""
        return self._tenants[tenant].waiting if tenant in self._tenants else 0

    def waiting_s(self, tenant: str) -> float:
        """The work of a tenant's waiting calls."""
        return self._tenants[tenant].work_s if tenant in self._tenants else 0.0

    @property
    def tenants(self) -> int:
        """How many tenants have waiting calls."""
        return sum(tenant.waiting > 0 for tenant in self._tenants.values())

    def share(self, name: str) -> float:
        """The part of the service that a tenant gets while it and those that wait now do: 1 if nobody else waits."""
        others = sum(self._weight(other) for other, tenant in self._tenants.items() if tenant.waiting and other != name)
        return self._weight(name) / (self._weight(name) + others)

    def push(self, ticket: Ticket) -> None:
        """A call waits."""
        tenant = self._tenants.setdefault(ticket.tenant, _Tenant())
        if tenant.waiting == 0:
            tenant.served = max(tenant.served, self._now)
            self._enter(ticket.tenant, tenant)
        ticket.number = next(self._turn)
        tenant.of(ticket).setdefault(ticket.session, deque()).append(ticket)
        self._count(tenant, ticket, 1)

    def pop(self, may_go: Callable[[str], bool] = lambda _: True) -> Ticket | None:
        """The call that goes next, of the tenants that `may_go`; None if none does."""
        skipped: list[tuple[float, int, str]] = []
        try:
            while self._order:
                entry = heapq.heappop(self._order)
                served, _, name = entry
                tenant = self._tenants.get(name)
                if tenant is None or tenant.waiting == 0 or served != tenant.served:
                    continue
                if may_go(name):
                    return self._serve(name, tenant)
                skipped.append(entry)
            return None
        finally:
            for entry in skipped:
                heapq.heappush(self._order, entry)

    def remove(self, ticket: Ticket) -> bool:
        """A call does not wait any more; False if it did not."""
        tenant = self._tenants.get(ticket.tenant)
        sessions = None if tenant is None else tenant.of(ticket)
        tickets = None if sessions is None else sessions.get(ticket.session)
        if tenant is None or sessions is None or tickets is None or ticket not in tickets:
            return False
        tickets.remove(ticket)
        if not tickets:
            del sessions[ticket.session]
        self._count(tenant, ticket, -1)
        return True

    def charge(self, name: str, tokens: float) -> None:
        """A tenant was served these tokens. A negative number gives tokens back that a call did not need."""
        tenant = self._tenants.get(name)
        if tenant is None:
            return
        tenant.served = max(0.0, tenant.served + tokens / self._weight(name))
        if tenant.waiting:
            self._enter(name, tenant)
        elif tenant.served <= self._now:
            del self._tenants[name]  # as good as new

    def latest_of(self, name: str) -> Ticket:
        """The call to give up first of a tenant that has waiting calls."""
        tenant = self._tenants[name]
        sessions = tenant.throughput or tenant.urgent
        return max((tickets[-1] for tickets in sessions.values()), key=lambda ticket: ticket.number)

    def victim(self) -> Ticket | None:
        """The call to give up first if too much waits; None if none waits.

        Calls for throughput go before others. Among the tenants that have such calls, or else among all, it is the
        latest call of the one with the most waiting work for its weight. So a tenant within its share loses nothing to
        another's queue.
        """
        those = [item for item in self._tenants.items() if item[1].throughput]
        those = those or [item for item in self._tenants.items() if item[1].waiting]
        if not those:
            return None
        heaviest, _ = max(those, key=lambda item: item[1].work_s / self._weight(item[0]))
        return self.latest_of(heaviest)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        tickets = list(self)
        assert len(tickets) == self._length
        assert abs(self.work_s - sum(ticket.work_s for ticket in tickets)) < 1e-6
        for name, tenant in self._tenants.items():
            assert tenant.waiting == sum(ticket.tenant == name for ticket in tickets)
            assert all(tenant.urgent.values())
            assert all(tenant.throughput.values())

    def _weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def _serve(self, name: str, tenant: _Tenant) -> Ticket:
        self._now = max(self._now, tenant.served)
        ticket = tenant.take()
        self._count(tenant, ticket, -1)
        self.charge(name, ticket.tokens)
        return ticket

    def _enter(self, name: str, tenant: _Tenant) -> None:
        heapq.heappush(self._order, (tenant.served, next(self._turn), name))

    def _count(self, tenant: _Tenant, ticket: Ticket, sign: int) -> None:
        tenant.waiting += sign
        tenant.work_s = tenant.work_s + sign * ticket.work_s if tenant.waiting else 0.0
        self._length += sign
        self.work_s = self.work_s + sign * ticket.work_s if self._length else 0.0  # rounding ends with the calls
