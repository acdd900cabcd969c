"""What waits: a call, and the calls for one model with their work by tenant, how fast it goes, and what is too much."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import takewhile

import msgspec

from plait.backends.errors import PlaitError
from plait.gateway.admission.waits import MOST_WAITS, LineChange, Wait, WaitReason, seconds_by_reason
from plait.gateway.fleet.booking import Booking
from plait.policy.admission.conversations import Conversations, join
from plait.policy.admission.fair_shares import FairShares
from plait.policy.admission.line import Rank
from plait.policy.costs.prefill_queue import Precedence
from plait.policy.sessions.session_gate import Turn
from plait.policy.types import Call, Objective

SMOOTHING_S = 10.0
"""The rate follows about the last ten seconds."""

FIRST_S = 5.0
"""The first rate is that of so long a time. Calls leave a cold fleet slowly at first: it computes their prompts."""

NEXT_S = 0.5
"""Between two looks at the rate."""


class Waiting(msgspec.Struct, eq=False):
    """A call on its way to an engine. A line knows it as a `Ticket`, a session gate as an `Arrival`.

    Whoever makes one says what is asked. Then each field has one writer, in the module that is named.
    """

    # What is asked.

    tenant: str

    tokens: int
    """Its prompt, and the output that is expected."""

    call: Call
    """`admission` changes its objectives."""

    output_tokens: int = 0
    """The output that is expected."""

    prefer: str | None = None
    """As `avoid` and `route`, for `Router.select`."""

    avoid: Collection[str] = ()

    route: str | None = None

    session: str = ""
    """The session that its client has named."""

    compares: int = 0
    """As for `Router.select`."""

    passes: bool = False
    """Whether it is never held for its session's sake."""

    is_leased: bool = False
    """Whether it is within its tenant's rates over several gateways: the gate asks."""

    tell: Callable[[], None] | None = None
    """Called when a call that has waited is to be sent, or has an error. Whoever lets it enter sets this."""

    # Its place in a line.

    number: int = 0
    """Its place among all calls that came, set in `admission`."""

    is_back: bool = False
    """Whether it has the number that it had when it came first, set in `admission`."""

    rank: Rank = Rank.NORMAL
    """Set in `queue`; the `line` changes it while the call is there."""

    priority: int = 0
    """Set in `queue`."""

    precedence: Precedence = Precedence.REST
    """Set in `lines`; the `line` changes it while the call is there."""

    work_s: float = 0.0
    """The engine time that it counts with, set in `queue`."""

    before: int = 0
    """The calls of its tenant that have waited for its model before it, set in `backlog`."""

    before_s: float = 0.0
    """Their work, set in `backlog`."""

    # Its session.

    turn: Turn | None = None
    """The call's turn in the session gate of its model, set in `admission`."""

    # What has become of it.

    booking: Booking | None = None
    """Set in `lines` while it is placed."""

    released: Booking | None = None
    """The latest booking that was undone before it was sent, set in `lines`."""

    is_sent: bool = False
    """Whether it is to be sent, or is: set in `lines`."""

    error: PlaitError | None = None
    """Why it is not sent, set in `queue`."""

    # What it has waited for.

    waits: list[Wait] | None = None
    """One after the other, by `wait_for`; None if it has not waited."""

    line_changes: tuple[LineChange, ...] = ()
    """Set in `lines`."""

    def wait_for(self, why: WaitReason, now_s: float) -> None:
        """The call waits for this from now on. A reason that has lasted no time is replaced."""
        waits = self.waits
        if waits is None:
            self.waits = [Wait(why, now_s)]
            return
        if waits[-1].since_s >= now_s:
            waits.pop()
        if not waits or (waits[-1].why != why and len(waits) < MOST_WAITS):
            waits.append(Wait(why, now_s))

    def wait_for_all(self, waits: Iterable[Wait]) -> None:
        """The call has waited for these, too, since its latest wait began."""
        since_s = self.waits[-1].since_s if self.waits else 0.0
        for wait in waits:
            self.wait_for(wait.why, max(since_s, wait.since_s))

    def waited_until_s(self, now_s: float) -> float:
        """When the call was first sent; now if it was not."""
        return self.booking.sent_s if self.is_sent and self.booking is not None else now_s

    def waited_for(self, now_s: float) -> dict[str, float] | None:
        """The seconds that the call has waited, by reason; None if it has not waited."""
        return seconds_by_reason(self.waits or (), self.waited_until_s(now_s))

    @property
    def conversation(self) -> str:
        """The conversation that takes turns with its tenant's others; empty for calls that are of none.

        Calls of a program are of none: a program is over sooner if its calls go one after the other.
        """
        return "" if self.passes else self.session

    @property
    def is_held(self) -> bool:
        """Whether its session waits for room in the engines' caches."""
        return self.turn is not None and self.turn.is_held

    @property
    def engine_id(self) -> str:
        """The engine that the call is placed on."""
        assert self.booking is not None
        return self.booking.placement.engine_id


def rank_of(call: Call) -> Rank:
    """The class of a call."""
    if call.objective is Objective.LATENCY or (call.slo is not None and call.slo.has_zero):
        return Rank.URGENT
    return Rank.THROUGHPUT if call.objective is Objective.THROUGHPUT else Rank.NORMAL


class DrainRate:
    """How fast waiting work goes: seconds of predicted work that leave the queue in a second.

    Corrects predicted work by what was seen. Until calls have left, so many `engines` do a second of it each.
    """

    def __init__(self, engines: int = 1) -> None:
        self._rate = float(max(1, engines))
        self.is_measured = False
        self._work_s = 0.0
        self._since_s: float | None = None

    def left(self, work_s: float, now_s: float) -> None:
        """A call left the queue."""
        if self._since_s is None:
            self._since_s, self._work_s = now_s, 0.0
            return
        self._work_s += work_s
        elapsed_s = now_s - self._since_s
        if elapsed_s >= (NEXT_S if self.is_measured else FIRST_S):
            share = min(1.0, elapsed_s / SMOOTHING_S) if self.is_measured else 1.0
            self.is_measured = True
            self._rate += share * (self._work_s / elapsed_s - self._rate)
            self._since_s, self._work_s = now_s, 0.0

    def pause(self) -> None:
        """The queue is empty: the time until the next call says nothing of the rate."""
        self._since_s = None

    def seconds(self, work_s: float) -> float:
        """How long this much work takes to leave."""
        return work_s / max(self._rate, 1e-3)


class _TenantWork:
    """One tenant's waiting calls, in the order in which they came, and how fast they go."""

    __slots__ = ("calls", "for_throughput", "gone", "gone_s", "rate", "work_s")

    def __init__(self, engines: int) -> None:
        self.calls: dict[Waiting, None] = {}
        self.for_throughput: dict[Waiting, None] = {}
        self.work_s = 0.0
        self.gone, self.gone_s = 0, 0.0  # the calls that wait no more, and their work
        self.rate = DrainRate(engines)

    def before(self, call: Waiting) -> tuple[int, float]:
        """How many calls have waited before this one, which has just joined, and their work."""
        if not call.is_back:  # it is the last one
            return self.gone + len(self.calls) - 1, self.gone_s + self.work_s
        first = list(takewhile(lambda one: one is not call, self.calls))
        return self.gone + len(first), self.gone_s + sum(one.work_s for one in first)

    def latest(self, conversations: Collection[str]) -> Waiting:
        """The call to give up first: the latest of these conversations, of those for throughput if there are any.

        If these have none there, it is the latest of all.
        """
        calls = self.for_throughput or self.calls
        return next((call for call in reversed(calls) if call.conversation in conversations), next(reversed(calls)))


class Backlog:
    """The calls that wait for one model, wherever they wait. It is served by so many `engines` when it begins.

    `conversations` counts what waits of each, for all models.
    """

    def __init__(self, shares: FairShares, conversations: Conversations, engines: int) -> None:
        self.work_s = 0.0
        self.length = 0
        self._shares = shares
        self._conversations = conversations
        self._engines = engines
        self._rate = DrainRate(engines)
        self._tenants: dict[str, _TenantWork] = {}

    @property
    def is_measured(self) -> bool:
        """Whether it is known how fast calls leave."""
        return self._rate.is_measured

    @property
    def wait_s(self) -> float:
        """The predicted seconds until all that waits has been sent."""
        return self._rate.seconds(self.work_s)

    def tenants(self) -> list[str]:
        """Those with calls that wait."""
        return [name for name, tenant in self._tenants.items() if tenant.calls]

    def waiting(self, tenant: str) -> int:
        """How many calls of a tenant wait."""
        return len(self._tenants[tenant].calls) if tenant in self._tenants else 0

    def tenant_wait_s(self, name: str) -> float:
        """How long a tenant's calls take to leave. Before its own rate is known, it has its share of the whole."""
        tenant = self._tenants[name]
        if tenant.rate.is_measured:
            return tenant.rate.seconds(tenant.work_s)
        weights = {other: self._shares.weight(other) for other, one in self._tenants.items() if one.calls}
        return self._rate.seconds(tenant.work_s * sum(weights.values()) / weights.get(name, 1.0))

    def add(self, call: Waiting) -> None:
        """A call waits."""
        tenant = self._tenants.get(call.tenant)
        if tenant is None:
            tenant = self._tenants[call.tenant] = _TenantWork(self._engines)
        join(tenant.calls, call)
        self._conversations.waits(call.tenant, call.conversation)
        call.before, call.before_s = tenant.before(call)
        self.mark(call)
        self._count(tenant, call, 1)

    def mark(self, call: Waiting) -> None:
        """A waiting call may have another class than before."""
        for_throughput = self._tenants[call.tenant].for_throughput
        if call.rank is Rank.THROUGHPUT:
            join(for_throughput, call)
        else:
            for_throughput.pop(call, None)

    def remove(self, call: Waiting) -> None:
        """A call does not wait any more."""
        tenant = self._tenants[call.tenant]
        del tenant.calls[call]
        self._conversations.left(call.tenant, call.conversation)
        tenant.for_throughput.pop(call, None)
        tenant.gone, tenant.gone_s = tenant.gone + 1, tenant.gone_s + call.work_s
        self._count(tenant, call, -1)

    def outlook(self, call: Waiting) -> tuple[int, float]:
        """A waiting call's place among those of its tenant, as if they went in turn, and the seconds until it goes."""
        tenant = self._tenants[call.tenant]
        ahead_s = max(0.0, call.before_s - tenant.gone_s) + call.work_s
        share = min(1.0, ahead_s / tenant.work_s) if tenant.work_s else 0.0
        return max(1, call.before - tenant.gone + 1), share * self.tenant_wait_s(call.tenant)

    def sent(self, call: Waiting, now_s: float) -> None:
        """A waiting call was sent."""
        self.remove(call)
        tenant = self._tenants[call.tenant]
        for rate in (self._rate, tenant.rate):
            rate.left(call.work_s, now_s)
        if not tenant.calls:
            tenant.rate.pause()
        if not self.length:
            self._rate.pause()

    def excess(self, name: str, most_s: float) -> Waiting | None:
        """The call to give up as more than `most_s` of work waits; None if so much does not wait.

        First the calls of tenant `name` count, which may take longer than all together would, because others overtake
        them. Of all, it is a call of the tenant with the most waiting work for its weight, among those with calls for
        throughput if there are any. It is the latest one of the conversation with the most waiting calls. One call of a
        tenant may always wait.
        """
        if self.waiting(name) > 1 and self.tenant_wait_s(name) > most_s:
            return self._latest(name)
        if self.wait_s <= most_s:
            return None
        waiting = [tenant for tenant in self._tenants.items() if len(tenant[1].calls) > 1]
        if not waiting:
            return None
        candidates = [one for one in waiting if one[1].for_throughput] or waiting
        return self._latest(max(candidates, key=lambda one: one[1].work_s / self._shares.weight(one[0]))[0])

    def _latest(self, tenant: str) -> Waiting:
        return self._tenants[tenant].latest(self._conversations.largest(tenant))

    def check(self) -> None:
        """Assert the invariants; for tests."""
        calls = [call for tenant in self._tenants.values() for call in tenant.calls]
        assert self.length == len(calls)
        assert abs(self.work_s - sum(call.work_s for call in calls)) < 1e-6
        assert all(call.tenant == name for name, tenant in self._tenants.items() for call in tenant.calls)

    def _count(self, tenant: _TenantWork, call: Waiting, sign: int) -> None:
        tenant.work_s = tenant.work_s + sign * call.work_s if tenant.calls else 0.0  # rounding ends with the calls
        self.length += sign
        self.work_s = self.work_s + sign * call.work_s if self.length else 0.0
