"""A line: the gateway's queue of calls for one engine.

In: a call joins (`push`), leaves unsent (`remove`), or gets another class (`change`). Out: the call to send next
(`take`), and small or urgent calls that may be sent before it (`having`, `first`). The order of calls is by

1. tenant: the one that is furthest behind by the fleet's `FairShares`;
2. class within a tenant: `policy.order`;
3. turns of hit-ratio groups, as in the engine's scheduler (Preble, section 3.3);
4. turns of conversations (`InTurn`), and within one by arrival.

Virtual times change while calls wait, so heap entries are stale until they are read: a reader checks an entry against
the present time, and enters the tenant again if it has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Generic, Protocol, TypeVar

from plait.policy.admission.conversations import InTurn, OfConversation
from plait.policy.admission.fair_shares import FairShares
from plait.policy.costs.prefill_queue import Precedence
from plait.policy.costs.situation import OvertakenInLine
from plait.policy.order import Kept, Rank
from plait.policy.scheduling.in_order import GROUPS, HitRatioGroups

LOOKED_AT = 32
"""Only this many first calls of a class are compared by hit ratio."""

MAY_PASS = (Precedence.ON_TIME, Precedence.SMALL)
"""Calls of these precedences may overtake all others in a line, in this order."""

LOOKED_ANEW = 8
"""Each choice looks up the hit ratios of this many calls again, round robin, in less time than a placement takes."""

MOST_OLD = 64
"""A heap is rebuilt when it has more stale entries than this, and more than half are stale."""


class Ticket(OfConversation, Protocol):
    """A waiting call."""

    tenant: str
    tokens: int
    """Its prompt and its expected output."""
    rank: Rank
    precedence: Precedence
    """The precedence that its prompt would have in the engine."""
    priority: int
    """In a rank, the lower goes first."""
    number: int
    """Ascending in the order of arrival."""
    work_s: float
    """The engine time that it takes."""
    prefill_s: float
    """The part of `work_s` that is its prefill."""
    is_back: bool
    """The client was told to retry, and did: the call has the `number` of its first arrival."""


T = TypeVar("T", bound=Ticket)
CachedShare = Callable[[T], float]
"""Returns the part of a call's tokens that are in the engine's cache now."""


class _Class(Generic[T]):
    """The waiting calls of one tenant and class."""

    __slots__ = ("_group_of", "_groups", "_next_look", "tickets")

    def __init__(self) -> None:
        self.tickets = InTurn[T]()
        self._group_of: dict[T, int] = {}  # the hit-ratio group at the last look
        self._groups = HitRatioGroups()
        self._next_look = 0

    def next(self, cached_share: CachedShare[T]) -> T:
        """The call that goes next, which is charged to its group. The class must not be empty."""
        first = list(islice(self.tickets, LOOKED_AT))
        for place in range(min(LOOKED_ANEW, len(first))):
            self._look(first[(self._next_look + place) % len(first)], cached_share)
        self._next_look += LOOKED_ANEW
        queues: list[list[T]] = [[] for _ in range(GROUPS)]
        for ticket in first:
            group = self._group_of.get(ticket)
            queues[self._look(ticket, cached_share) if group is None else group].append(ticket)
        while True:  # the chosen call's group may be stale: if it has changed, choose again
            group, ticket = next(self._groups.turns(queues))
            now_in = self._look(ticket, cached_share)
            if now_in == group:
                self._groups.charge(group)
                return ticket
            queues[group].remove(ticket)
            queues[now_in].append(ticket)

    @property
    def tokens(self) -> int:
        """Those of its first call."""
        return next(iter(self.tickets)).tokens

    def forget(self, ticket: T) -> None:
        """A call has left the class."""
        self._group_of.pop(ticket, None)

    def _look(self, ticket: T, cached_share: CachedShare[T]) -> int:
        """Look up the call's present group."""
        group = self._group_of[ticket] = min(GROUPS - 1, int(GROUPS * cached_share(ticket)))
        return group


class _Tenant(Generic[T]):
    """The waiting calls of one tenant, by class, and by precedence."""

    __slots__ = ("_kept", "_passed", "classes", "of_precedence", "prefill_s", "waiting", "weight", "work_s")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.classes: dict[tuple[Rank, int], _Class[T]] = {}
        self.of_precedence = {precedence: InTurn[T]() for precedence in Precedence}
        self._kept = Kept()
        self._passed = 0  # the tokens of small calls that the first of the `REST` has let pass
        self.waiting = 0
        self.work_s = self.prefill_s = 0.0

    def add(self, ticket: T) -> None:
        if (ticket.rank, ticket.priority) not in self.classes:
            self.classes[ticket.rank, ticket.priority] = _Class()
        for queue in self._queues(ticket):
            queue.add(ticket)

    def serve(self, ticket: T) -> None:
        """A call is sent: charge its tokens to its conversation and its class."""
        self.passed(ticket)
        for queue in self._queues(ticket):
            queue.serve(ticket)
        self._forget(ticket)

    def passed(self, ticket: T) -> None:
        """A call is sent, from here or as it arrives: charge its tokens to its rank."""
        if ticket.precedence is Precedence.SMALL and self.of_precedence[Precedence.REST]:
            self._passed += ticket.tokens
        elif ticket.precedence is Precedence.REST:
            self._passed = max(0, self._passed - ticket.tokens)
        self._kept.serve(ticket.rank, ticket.tokens, {rank for rank, _ in self.classes})

    def remove(self, ticket: T) -> None:
        """A call leaves unsent."""
        for queue in self._queues(ticket):
            queue.remove(ticket)
        self._forget(ticket)

    def _queues(self, ticket: T) -> list[InTurn[T]]:
        """The queues that have the call."""
        return [self.classes[ticket.rank, ticket.priority].tickets, self.of_precedence[ticket.precedence]]

    def _forget(self, ticket: T) -> None:
        of_rank = self.classes[ticket.rank, ticket.priority]
        of_rank.forget(ticket)
        if not of_rank.tickets:
            del self.classes[ticket.rank, ticket.priority]

    def next(self, cached_share: CachedShare[T]) -> T:
        return self.first_class().next(cached_share)

    def first_class(self) -> _Class[T]:
        """The class whose turn it is."""
        if len(self.classes) == 1:
            return next(iter(self.classes.values()))
        first = dict[Rank, _Class[T]]()  # of each rank, the class with the lowest priority
        for rank, priority in sorted(self.classes, reverse=True):
            first[rank] = self.classes[rank, priority]
        return first[self._kept.first({rank: one.tokens for rank, one in first.items()})]

    def lets_pass(self, ticket: T) -> bool:
        """Whether a small call goes before the others. Small calls pass another one until they had as many tokens: a
        flood of them may not hold the others up.
        """
        if ticket.rank is Rank.THROUGHPUT and min(self.classes)[0] < ticket.rank:
            return False
        rest = self.of_precedence[Precedence.REST]
        return not rest or self._passed < next(iter(rest)).tokens


class Line(Generic[T]):
    """The calls that wait for one engine. `work_s` is the sum of their work."""

    def __init__(self, shares: FairShares, cached_share: CachedShare[T]) -> None:
        self.work_s = self._prefill_s = 0.0
        self._weights = 0.0
        self._shares = shares
        self._cached_share = cached_share
        self._tickets: dict[T, None] = {}
        self._tenants: dict[str, _Tenant[T]] = {}
        self._order: list[tuple[float, int, str]] = []  # a heap of the waiting tenants; entries may be stale
        self._entered: dict[str, float] = {}  # the virtual time of each tenant's newest entry
        self._turn = count()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[T]:
        """The calls, in the order in which they joined."""
        return iter(self._tickets)

    @property
    def tenants(self) -> int:
        """How many tenants have waiting calls."""
        return len(self._tenants)

    def waiting(self, tenant: str) -> int:
        """How many calls of a tenant wait."""
        return self._tenants[tenant].waiting if tenant in self._tenants else 0

    def is_of(self, tenant: str) -> bool:
        """Whether all waiting calls are this tenant's."""
        return self._tenants.keys() == {tenant}

    def __contains__(self, ticket: T) -> bool:
        return ticket in self._tickets

    def latest(self, most: int) -> Iterator[T]:
        """The calls that joined last, the latest first."""
        return islice(reversed(self._tickets), most)

    def push(self, ticket: T) -> None:
        """A call joins the line."""
        tenant = self._tenants.get(ticket.tenant)
        self._shares.waits(ticket.tenant)
        if tenant is None:
            tenant = self._tenants[ticket.tenant] = _Tenant(self._shares.weight(ticket.tenant))
            self._weights += tenant.weight
            self._enter(ticket.tenant)
        tenant.add(ticket)
        tenant.waiting += 1
        tenant.work_s += ticket.work_s
        tenant.prefill_s += ticket.prefill_s
        self._tickets[ticket] = None
        self.work_s += ticket.work_s
        self._prefill_s += ticket.prefill_s

    def next_tenant(self) -> str:
        """The waiting tenant that is furthest behind. The line must not be empty."""
        while True:
            served, _, name = self._order[0]
            is_newest = self._entered.get(name) == served
            if is_newest and self._shares.served(name) <= served:
                return name
            heappop(self._order)
            if is_newest:
                self._enter(name)

    def by_share(self) -> list[str]:
        """The waiting tenants, the furthest behind first."""
        return sorted(self._tenants, key=self._shares.served)

    def is_before_all(self, tenant: str) -> bool:
        """Whether a tenant is further behind than all waiting ones. The line must not be empty."""
        return self._shares.served(tenant) < self._shares.served(self.next_tenant())

    def overtaken(self, tenant: str) -> OvertakenInLine | None:
        """The waiting calls that a call of the tenant would overtake if it joined now; None if there are none.

        While its own tenant's waiting work is served, the others get as much as their weights allow; the rest is
        overtaken.
        """
        mine, calls, prefill_s, share = self._tenants.get(tenant), len(self._tickets), self._prefill_s, 1.0
        for other in self._before(tenant) if mine is None else (mine,):
            calls, prefill_s = calls - other.waiting, prefill_s - other.prefill_s
        if mine is not None and calls:
            others_s = self.work_s - mine.work_s
            share -= (self._weights - mine.weight) / mine.weight * mine.work_s / others_s if others_s > 0.0 else 1.0
        if not calls or share <= 0.0:
            return None
        return OvertakenInLine(share * calls, share * prefill_s / self._prefill_s if prefill_s > 0.0 else 0.0)

    def _before(self, tenant: str) -> list[_Tenant[T]]:
        """The waiting tenants that are further behind than `tenant`, which has no waiting call."""
        served = self._shares.served
        own = served(tenant)
        if not self._tenants or own <= served(self.next_tenant()):
            return []
        return [other for name, other in self._tenants.items() if served(name) < own]

    def take(self, tenant: str | None = None) -> T:
        """Remove and return the call to send next, of `tenant` or of the next tenant, and charge its tokens."""
        ticket = self._tenants[self.next_tenant() if tenant is None else tenant].next(self._cached_share)
        self.serve(ticket)
        return ticket

    def serve(self, ticket: T) -> None:
        """Remove a call that is sent, in its turn or before it, and charge its tokens to its tenant."""
        self._shares.serve(ticket.tenant, ticket.tokens)
        self._tenants[ticket.tenant].serve(ticket)
        self._left(ticket)

    def remove(self, ticket: T) -> None:
        """A call leaves the line unsent."""
        self._tenants[ticket.tenant].remove(ticket)
        self._left(ticket)

    def _left(self, ticket: T) -> None:
        del self._tickets[ticket]
        self.work_s = self.work_s - ticket.work_s if self._tickets else 0.0  # 0.0 drops rounding errors
        self._prefill_s = self._prefill_s - ticket.prefill_s if self._tickets else 0.0
        tenant = self._tenants[ticket.tenant]
        tenant.waiting -= 1
        tenant.work_s -= ticket.work_s
        tenant.prefill_s -= ticket.prefill_s
        self._shares.left(ticket.tenant)
        if not tenant.waiting:
            del self._tenants[ticket.tenant], self._entered[ticket.tenant]
            self._weights = self._weights - tenant.weight if self._tenants else 0.0

    def change(self, ticket: T, rank: Rank, precedence: Precedence) -> None:
        """A waiting call gets another rank or precedence, and joins the end of its conversation there."""
        if (rank, precedence) != (ticket.rank, ticket.precedence):
            tenant = self._tenants[ticket.tenant]
            tenant.remove(ticket)
            ticket.rank, ticket.precedence = rank, precedence
            tenant.add(ticket)

    def next_call(self, tenant: str) -> T:
        """The first call of a waiting tenant. `take` may choose another one of its class, by the hit-ratio groups."""
        return next(iter(self._tenants[tenant].first_class().tickets))

    def having(self, precedence: Precedence) -> list[str]:
        """The tenants with waiting calls of a precedence that may overtake, the furthest behind first."""
        found = [name for name, tenant in self._tenants.items() if tenant.of_precedence[precedence]]
        return sorted(found, key=self._shares.served) if len(found) > 1 else found

    def first(self, tenant: str, precedence: Precedence, most: int) -> list[T]:
        """The next calls of a tenant and a precedence to check for room, at most `most`."""
        return list(islice(self._tenants[tenant].of_precedence[precedence], most))

    def look_later(self, ticket: T) -> None:
        """There was no room for a call that may overtake: check the tenant's others before this one again."""
        self._tenants[ticket.tenant].of_precedence[ticket.precedence].defer(ticket)

    def first_urgent(self, tenant: str) -> T | None:
        """The earliest urgent call of a tenant; None if none waits."""
        mine = self._tenants.get(tenant)
        if mine is None:
            return None
        urgent = (next(iter(one.tickets)) for key, one in mine.classes.items() if key[0] <= Rank.LATENCY)
        return min(urgent, key=lambda ticket: ticket.number, default=None)

    def lets_pass(self, ticket: T) -> bool:
        """Whether a small call, which waits here or has just come, goes before the others of its tenant."""
        mine = self._tenants.get(ticket.tenant)
        if mine is None:
            return True
        is_behind = ticket not in self._tickets and mine.of_precedence[Precedence.SMALL]
        return not is_behind and mine.lets_pass(ticket)

    def passed(self, ticket: T) -> None:
        """A call has passed the line as it arrived."""
        mine = self._tenants.get(ticket.tenant)
        if mine is not None:
            mine.passed(ticket)

    def earlier(self, tenant: str) -> None:
        """The virtual time of a tenant went back."""
        if self._entered.get(tenant, 0.0) > self._shares.served(tenant):
            self._enter(tenant)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert abs(self.work_s - sum(ticket.work_s for ticket in self._tickets)) < 1e-6
        assert abs(self._prefill_s - sum(ticket.prefill_s for ticket in self._tickets)) < 1e-6
        assert abs(self._prefill_s - sum(tenant.prefill_s for tenant in self._tenants.values())) < 1e-6
        assert sum(tenant.waiting for tenant in self._tenants.values()) == len(self._tickets)
        for name, tenant in self._tenants.items():
            queued = [ticket for of_rank in tenant.classes.values() for ticket in of_rank.tickets]
            assert tenant.waiting == len(queued) > 0
            assert all(ticket.tenant == name and ticket in self._tickets for ticket in queued)
            for precedence, those in tenant.of_precedence.items():
                assert set(those) == {ticket for ticket in queued if ticket.precedence is precedence}
        assert self._entered.keys() == self._tenants.keys()

    def _enter(self, tenant: str) -> None:
        served = self._entered[tenant] = self._shares.served(tenant)
        heappush(self._order, (served, next(self._turn), tenant))
        if len(self._order) > 2 * len(self._entered) + MOST_OLD:
            self._order = [(served, next(self._turn), tenant) for tenant, served in self._entered.items()]
            heapify(self._order)
