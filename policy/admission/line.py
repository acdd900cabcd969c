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

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from math import inf
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
    """The waiting calls of one tenant, rank and priority. `of` has them by precedence."""

    __slots__ = ("_group_of", "_groups", "_next_look", "_passed", "of", "tickets")

    def __init__(self) -> None:
        self.tickets = InTurn[T]()
        self.of = {precedence: InTurn[T]() for precedence in Precedence}
        self._passed = 0  # the tokens of small calls that the first of the rest has let pass
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

    @property
    def lets_small_pass(self) -> bool:
        """Whether small calls go before the rest: until they had as many tokens as the first of the rest. A flood of
        them may not hold the others up.
        """
        rest = self.of[Precedence.REST]
        return not rest or self._passed < next(iter(rest)).tokens

    def passed(self, ticket: T) -> None:
        """A call of the class is sent."""
        if ticket.precedence is Precedence.SMALL and self.of[Precedence.REST]:
            self._passed += ticket.tokens
        elif ticket.precedence is Precedence.REST:
            self._passed = max(0, self._passed - ticket.tokens)

    def forget(self, ticket: T) -> None:
        """A call has left the class."""
        self._group_of.pop(ticket, None)

    def _look(self, ticket: T, cached_share: CachedShare[T]) -> int:
        """Look up the call's present group."""
        group = self._group_of[ticket] = min(GROUPS - 1, int(GROUPS * cached_share(ticket)))
        return group


class TenantCalls(Generic[T]):
    """The waiting calls of one tenant, in the order of their classes (`policy.order`)."""

    __slots__ = ("_kept", "_order", "classes", "prefill_s", "waiting", "weight", "work_s")

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.classes: dict[tuple[Rank, int], _Class[T]] = {}
        self._order: list[tuple[Rank, int]] = []  # the keys of `classes`, sorted
        self._kept = Kept()
        self.waiting = 0
        self.work_s = self.prefill_s = 0.0

    def add(self, ticket: T) -> None:
        key = ticket.rank, ticket.priority
        if key not in self.classes:
            self.classes[key] = _Class()
            insort(self._order, key)
        for queue in self._queues(ticket):
            queue.add(ticket)
        self.waiting += 1
        self.work_s += ticket.work_s
        self.prefill_s += ticket.prefill_s

    def serve(self, ticket: T) -> None:
        """A call is sent: charge its tokens to its conversation and its class."""
        self.passed(ticket)
        for queue in self._queues(ticket):
            queue.serve(ticket)
        self._forget(ticket)

    def passed(self, ticket: T) -> None:
        """A call is sent, from here or as it arrives: charge its tokens to its class."""
        own = self.classes.get((ticket.rank, ticket.priority))
        if own is not None:
            own.passed(ticket)
        self._kept.serve(ticket.rank, ticket.tokens, self._firsts())

    def remove(self, ticket: T) -> None:
        """A call leaves unsent."""
        for queue in self._queues(ticket):
            queue.remove(ticket)
        self._forget(ticket)

    def _queues(self, ticket: T) -> tuple[InTurn[T], InTurn[T]]:
        """The queues that have the call."""
        own = self.classes[ticket.rank, ticket.priority]
        return own.tickets, own.of[ticket.precedence]

    def _forget(self, ticket: T) -> None:
        key = ticket.rank, ticket.priority
        own = self.classes[key]
        own.forget(ticket)
        if not own.tickets:
            del self.classes[key], self._order[bisect_left(self._order, key)]
        self.waiting -= 1
        self.work_s -= ticket.work_s
        self.prefill_s -= ticket.prefill_s

    def change(self, ticket: T, rank: Rank, precedence: Precedence) -> None:
        """A call gets another rank, and joins the end of its conversation there; or another precedence in its place."""
        if rank is not ticket.rank:
            self.remove(ticket)
            ticket.rank, ticket.precedence = rank, precedence
            self.add(ticket)
        elif precedence is not ticket.precedence:
            of = self.classes[rank, ticket.priority].of
            of[ticket.precedence].remove(ticket)
            of[precedence].add(ticket)
            ticket.precedence = precedence

    @property
    def next_call(self) -> T:
        """The first call of the class whose turn it is."""
        return next(iter(self.classes[self.first()].tickets))

    def first(self) -> tuple[Rank, int]:
        """The class whose turn it is."""
        if len(self.classes) == 1:
            return next(iter(self.classes))
        firsts = self._firsts()
        return firsts[self._kept.first({rank: self.classes[key].tokens for rank, key in firsts.items()})]

    def _firsts(self) -> dict[Rank, tuple[Rank, int]]:
        """The class with the lowest priority of each waiting rank."""
        places = ((rank, bisect_left(self._order, (rank, -inf))) for rank in Rank)
        return {rank: self._order[at] for rank, at in places if at < len(self._order) and self._order[at][0] is rank}

    def having(self, precedence: Precedence) -> Iterator[T]:
        """The waiting calls of a precedence, by class."""
        return chain.from_iterable(self.classes[key].of[precedence] for key in self._order)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self._order == sorted(self.classes)
        for key, one in self.classes.items():
            assert all((ticket.rank, ticket.priority) == key for ticket in one.tickets)
            for precedence, those in one.of.items():
                assert set(those) == {ticket for ticket in one.tickets if ticket.precedence is precedence}

    def lets_pass(self, ticket: T, *, waits: bool) -> bool:
        """Whether a small call, which `waits` here or has just come, goes before the others: in its class's turn."""
        key, first = (ticket.rank, ticket.priority), self.first()
        own = self.classes.get(key)
        if own is None:
            return key < first == self._order[0]
        return key == first and own.lets_small_pass and (waits or not own.of[Precedence.SMALL])


class Line(Generic[T]):
    """The calls that wait for one engine. `work_s` is the sum of their work."""

    def __init__(self, shares: FairShares, cached_share: CachedShare[T]) -> None:
        self.work_s = self._prefill_s = 0.0
        self._weights = 0.0
        self._shares = shares
        self._cached_share = cached_share
        self._tickets: dict[T, None] = {}
        self._tenants: dict[str, TenantCalls[T]] = {}
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
            tenant = self._tenants[ticket.tenant] = TenantCalls(self._shares.weight(ticket.tenant))
            self._weights += tenant.weight
            self._enter(ticket.tenant)
        tenant.add(ticket)
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

    def _before(self, tenant: str) -> list[TenantCalls[T]]:
        """The waiting tenants that are further behind than `tenant`, which has no waiting call."""
        served = self._shares.served
        own = served(tenant)
        if not self._tenants or own <= served(self.next_tenant()):
            return []
        return [other for name, other in self._tenants.items() if served(name) < own]

    def take(self, tenant: str | None = None) -> T:
        """Remove and return the call to send next, of `tenant` or of the next tenant, and charge its tokens."""
        ticket = self._first_class(self.next_tenant() if tenant is None else tenant).next(self._cached_share)
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
        self._shares.left(ticket.tenant)
        if not tenant.waiting:
            del self._tenants[ticket.tenant], self._entered[ticket.tenant]
            self._weights = self._weights - tenant.weight if self._tenants else 0.0

    def change(self, ticket: T, rank: Rank, precedence: Precedence) -> None:
        """A waiting call gets another rank or precedence."""
        self._tenants[ticket.tenant].change(ticket, rank, precedence)

    def _first_class(self, tenant: str) -> _Class[T]:
        mine = self._tenants[tenant]
        return mine.classes[mine.first()]

    def next_call(self, tenant: str) -> T:
        """The first call of a waiting tenant. `take` may choose another one of its class, by the hit-ratio groups."""
        return self._tenants[tenant].next_call

    def first_small(self, tenant: str, most: int) -> list[T]:
        """At most `most` small calls, one of which goes first in a waiting tenant's turn."""
        first = self._first_class(tenant)
        goes = first.of[Precedence.REST] and first.lets_small_pass
        return list(islice(first.of[Precedence.SMALL], most)) if goes else []

    def having(self, precedence: Precedence) -> list[str]:
        """The tenants with waiting calls of a precedence that may overtake, the furthest behind first."""
        found = [name for name, tenant in self._tenants.items() if next(tenant.having(precedence), None)]
        return sorted(found, key=self._shares.served) if len(found) > 1 else found

    def first(self, tenant: str, precedence: Precedence, most: int) -> list[T]:
        """The next calls of a tenant and a precedence to check for room, at most `most`."""
        return list(islice(self._tenants[tenant].having(precedence), most))

    def look_later(self, ticket: T) -> None:
        """There was no room for a call that may overtake: check the others of its class before this one again."""
        self._tenants[ticket.tenant].classes[ticket.rank, ticket.priority].of[ticket.precedence].defer(ticket)

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
        return mine is None or mine.lets_pass(ticket, waits=ticket in self._tickets)

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
            tenant.check()
        assert self._entered.keys() == self._tenants.keys()

    def _enter(self, tenant: str) -> None:
        served = self._entered[tenant] = self._shares.served(tenant)
        heappush(self._order, (served, next(self._turn), tenant))
        if len(self._order) > 2 * len(self._entered) + MOST_OLD:
            self._order = [(served, next(self._turn), tenant) for tenant, served in self._entered.items()]
            heapify(self._order)
