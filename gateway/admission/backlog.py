"""A waiting call (`Waiting`), and all waiting calls of one model (`Backlog`): their work, and how fast it drains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import takewhile

import msgspec

from plait.backends.errors import PlaitError
from plait.gateway.admission.waits import MOST_WAITS, LineChange, Wait, WaitReason, seconds_by_reason
from plait.gateway.fleet.booking import Booking
from plait.policy.admission.conversations import Conversations, join
from plait.policy.admission.fair_shares import FairShares
from plait.policy.costs.prefill_queue import Precedence
from plait.policy.order import Rank, rank_of
from plait.policy.sessions.session_gate import Turn
from plait.policy.types import Call

SMOOTHING_S = 10.0
"""The time constant of the rate's moving mean."""

FIRST_S = 5.0
"""The first measurement takes this long: calls leave a cold fleet slowly, because it computes all of their prompts."""

NEXT_S = 0.5
"""The least time between two later measurements."""


class Waiting(msgspec.Struct, eq=False):
    """A call on its way to an engine: a `Ticket` for a line, an `Arrival` for a session gate.

    The maker fills the first part. Each other field has one writer: the module that its line names.
    """

    # What is asked.

    tenant: str

    tokens: int
    """The prompt and the expected output."""

    call: Call
    """`admission` changes its objectives."""

    output_tokens: int = 0
    """The expected output."""

    prefer: str | None = None
    """For `Router.select`, as `avoid` and `route`."""

    avoid: Collection[str] = ()

    route: str | None = None

    session: str = ""
    """The session that the client names: an agent's context."""

    run: str = ""
    """The run that the session's agent works for; empty: the session itself."""

    is_final: bool = False
    """Whether the client said that this is the session's last call."""

    passes: bool = False
    """The session gate never holds it."""

    is_leased: bool = False
    """It is within its tenant's rates over several gateways, so the rates here are not asked."""

    tell: Callable[[], None] | None = None
    """Called when a waiting call was sent or got an error. The caller of `Admission.enter` sets it."""

    # Its place in a line.

    number: int = 0
    """Ascending in the order of arrival, set in `admission`."""

    is_back: bool = False
    """It is a retry with the number of its first arrival, or was held by its session gate; set in `admission`."""

    rank: Rank = Rank.PLAIN
    """Set when it begins to wait; the `line` changes it while the call is there."""

    priority: int = 0
    """Set when it begins to wait."""

    precedence: Precedence = Precedence.REST
    """Set in `lines`; the `line` changes it while the call is there."""

    work_s: float = 0.0
    """The engine time that it counts as, set in `queue`."""

    prefill_s: float = 0.0
    """The part of `work_s` that is its prefill, set in `queue`."""

    before: int = 0
    """How many calls of its tenant have ever waited for its model before it, set in `backlog`."""

    before_s: float = 0.0
    """The work of these calls, set in `backlog`."""

    # Its session.

    turn: Turn | None = None
    """The call's turn in the session gate of its model, set in `admission`."""

    # Its outcome.

    booking: Booking | None = None
    """Set in `lines` while it is placed."""

    released: Booking | None = None
    """The latest booking that was undone before it was sent, set in `lines`."""

    is_sent: bool = False
    """The engine has room for it: the call may be sent, or was; set in `lines`."""

    error: PlaitError | None = None
    """Why it was not sent, set in `queue`."""

    # What it has waited for.

    waits: list[Wait] | None = None
    """The reasons in order of time; None: it has not waited."""

    line_changes: tuple[LineChange, ...] = ()
    """Set in `lines`."""

    def find_rank(self) -> None:
        """Set `rank` and `priority` by the objectives of the call."""
        self.rank, self.priority = rank_of(self.call.slo, self.call.objective), self.call.priority

    def wait_for(self, why: WaitReason, now_s: float) -> None:
        """The call waits for `why` from now on. A reason that lasted no time is replaced."""
        waits = self.waits
        if waits is None:
            self.waits = [Wait(why, now_s)]
            return
        if waits[-1].since_s >= now_s:
            waits.pop()
        if not waits or (waits[-1].why != why and len(waits) < MOST_WAITS):
            waits.append(Wait(why, now_s))

    def wait_for_all(self, waits: Iterable[Wait]) -> None:
        """Add the waits of a line's first call, from the begin of this call's latest wait on."""
        since_s = self.waits[-1].since_s if self.waits else 0.0
        for wait in waits:
            self.wait_for(wait.why, max(since_s, wait.since_s))

    def waited_until_s(self, now_s: float) -> float:
        """When the call was sent; now if it was not."""
        return self.booking.sent_s if self.is_sent and self.booking is not None else now_s

    def waited_for(self, now_s: float) -> dict[str, float] | None:
        """The seconds that the call has waited, by reason; None if it has not waited."""
        return seconds_by_reason(self.waits or (), self.waited_until_s(now_s))

    @property
    def conversation(self) -> str:
        """The conversation that takes turns with its tenant's others, with all its agents; empty: none.

        Calls of a program have none: a program ends sooner if its calls are served one after the other.
        """
        return "" if self.passes else self.run or self.session

    @property
    def is_held(self) -> bool:
        """Whether its session gate holds it."""
        return self.turn is not None and self.turn.is_held

    @property
    def engine_id(self) -> str:
        assert self.booking is not None
        return self.booking.placement.engine_id


class DrainRate:
    """How fast a queue drains: seconds of predicted work that leave in a second.

    Until it is measured, each of the `engines` is taken to do one second of work in a second.
    """

    def __init__(self, engines: int = 1) -> None:
        self._rate = float(max(1, engines))
        self.is_measured = False
        self._work_s = 0.0
        self._since_s: float | None = None

    def left(self, work_s: float, now_s: float) -> None:
        """A call of `work_s` left the queue."""
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
        """The queue is empty: the time until the next call does not count."""
        self._since_s = None

    def seconds(self, work_s: float) -> float:
        """How long this much work takes to leave."""
        return work_s / max(self._rate, 1e-3)


class _TenantWork:
    """One tenant's waiting calls in the order of arrival, and how fast they leave."""

    __slots__ = ("calls", "for_throughput", "gone", "gone_s", "rate", "work_s")

    def __init__(self, engines: int) -> None:
        self.calls: dict[Waiting, None] = {}
        self.for_throughput: dict[Waiting, None] = {}
        self.work_s = 0.0
        self.gone, self.gone_s = 0, 0.0  # how many calls have left, and their work
        self.rate = DrainRate(engines)

    def before(self, call: Waiting) -> tuple[int, float]:
        """(calls, their work) that have ever waited before this call, which has just joined."""
        if not call.is_back:  # it is the last one
            return self.gone + len(self.calls) - 1, self.gone_s + self.work_s
        first = list(takewhile(lambda one: one is not call, self.calls))
        return self.gone + len(first), self.gone_s + sum(one.work_s for one in first)

    def latest(self, conversations: Collection[str]) -> Waiting:
        """The call to refuse first: the latest one of these conversations, or else of all.

        Only calls for throughput are considered if there are any.
        """
        calls = self.for_throughput or self.calls
        return next((call for call in reversed(calls) if call.conversation in conversations), next(reversed(calls)))


class Backlog:
    """The waiting calls of one model, placed or not. `engines` is how many serve the model at first.

    `conversations` counts the waiting calls of each conversation, over all models.
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
        """Whether the drain rate was measured."""
        return self._rate.is_measured

    @property
    def wait_s(self) -> float:
        """The predicted seconds until all waiting calls have been sent."""
        return self._rate.seconds(self.work_s)

    def tenants(self) -> list[str]:
        """The tenants with waiting calls."""
        return [name for name, tenant in self._tenants.items() if tenant.calls]

    def waiting(self, tenant: str) -> int:
        """How many calls of a tenant wait."""
        return len(self._tenants[tenant].calls) if tenant in self._tenants else 0

    def tenant_wait_s(self, name: str) -> float:
        """The predicted seconds until a tenant's calls have been sent; by its share until its own rate is measured."""
        tenant = self._tenants[name]
        if tenant.rate.is_measured:
            return tenant.rate.seconds(tenant.work_s)
        weights = {other: self._shares.weight(other) for other, one in self._tenants.items() if one.calls}
        return self._rate.seconds(tenant.work_s * sum(weights.values()) / weights.get(name, 1.0))

    def add(self, call: Waiting) -> None:
        """A call begins to wait."""
        tenant = self._tenants.get(call.tenant)
        if tenant is None:
            tenant = self._tenants[call.tenant] = _TenantWork(self._engines)
        join(tenant.calls, call)
        self._conversations.waits(call.tenant, call.conversation)
        call.before, call.before_s = tenant.before(call)
        self.mark(call)
        self._count(tenant, call, 1)

    def mark(self, call: Waiting) -> None:
        """A waiting call's rank may have changed."""
        for_throughput = self._tenants[call.tenant].for_throughput
        if call.rank is Rank.THROUGHPUT:
            join(for_throughput, call)
        else:
            for_throughput.pop(call, None)

    def remove(self, call: Waiting) -> None:
        """A call no longer waits."""
        tenant = self._tenants[call.tenant]
        del tenant.calls[call]
        self._conversations.left(call.tenant, call.conversation)
        tenant.for_throughput.pop(call, None)
        tenant.gone, tenant.gone_s = tenant.gone + 1, tenant.gone_s + call.work_s
        self._count(tenant, call, -1)

    def outlook(self, call: Waiting) -> tuple[int, float]:
        """(a call's place among its tenant's, predicted seconds until it is sent), as if they left in order."""
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
        """The call to refuse if more than `most_s` of work waits; None if the queue is within the bound.

        The tenant `name` is checked alone first: its calls may take longer than the whole queue, if others overtake
        them. For the whole queue, the refused call is one of the tenant with the most waiting work for its weight,
        among tenants with calls for throughput if there are any. It is the latest call of the conversation with the
        most waiting calls. One call of a tenant may always wait.
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

    def _count(self, tenant: _TenantWork, call: Waiting, sign: int) -> None:
        tenant.work_s = tenant.work_s + sign * call.work_s if tenant.calls else 0.0  # 0.0 drops rounding errors
        self.length += sign
        self.work_s = self.work_s + sign * call.work_s if self.length else 0.0
