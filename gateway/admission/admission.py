"""Admission: a call is placed at once while an engine has room for it. Else it waits here, and the tenants take turns.

A synchronous core; each event carries its time. What waits is placed when it leaves the queue, by what is known then.
See docs/design/admission.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from plait.backends.errors import LimitError, OverloadedError
from plait.gateway.admission.drain_rate import DrainRate
from plait.gateway.admission.tenant_limits import TenantLimits, TenantUse
from plait.policy.admission.fair_queue import FairQueue, Ticket

HasRoom = Callable[[str, float], bool]
"""Whether some engine of a model has room for one more call at a time."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The calls that may go now, and those that are given up because too much waits, with their errors."""

    admitted: tuple[Ticket, ...] = ()
    shed: tuple[tuple[Ticket, OverloadedError], ...] = ()


NOBODY = Turns()


@dataclass(slots=True)
class _Line:
    """The calls of one model that wait, and how fast they go, in all and by tenant.

    `placing` has left the queue and is not placed yet.
    """

    def tenant_wait_s(self, tenant: str) -> float:
        """How long a tenant's calls take to leave. Before its own rate is known, it has its share of the whole."""
        work_s, own = self.queue.waiting_s(tenant), self.rates.get(tenant)
        if own is not None and own.is_measured:
            return own.seconds(work_s)
        return self.rate.seconds(work_s / self.queue.share(tenant))

    def left(self, ticket: Ticket, now_s: float) -> None:
        """A call has left the queue to be placed."""
        own = self.rates.setdefault(ticket.tenant, DrainRate())
        for rate in (self.rate, own):
            rate.left(ticket.work_s, now_s)
        if not self.queue.waiting(ticket.tenant):
            own.pause()
        if not len(self.queue):
            self.rate.pause()

    queue: FairQueue
    rate: DrainRate = field(default_factory=DrainRate)
    rates: dict[str, DrainRate] = field(default_factory=dict)
    placing: Ticket | None = None


class Admission:
    """The calls that wait in the gateway. No call is to wait longer than `max_wait_s`, as predicted.

    `limits` returns the limits of a tenant. `weights` are the tenants' shares (default 1); they may change.
    """

    def __init__(
        self,
        has_room: HasRoom,
        max_wait_s: float,
        limits: Callable[[str], TenantLimits],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._has_room = has_room
        self._max_wait_s = max_wait_s
        self._limits = limits
        self._weights = {} if weights is None else weights
        self._lines: dict[str, _Line] = {}
        self._uses: dict[str, TenantUse] = {}

    def waiting(self, model: str) -> int:
        """How many calls wait for a model."""
        return len(self._lines[model].queue) if model in self._lines else 0

    @property
    def lines(self) -> list[str]:
        """The models that calls have waited for so far, or were admitted to."""
        return list(self._lines)

    @property
    def models(self) -> list[str]:
        """The models that calls wait for."""
        return [model for model, line in self._lines.items() if len(line.queue)]

    def wait_s(self, model: str) -> float:
        """The predicted seconds until all that waits for a model has been placed."""
        line = self._lines.get(model)
        return 0.0 if line is None else line.rate.seconds(line.queue.work_s)

    def use(self, tenant: str) -> TenantUse:
        """What a tenant uses now."""
        use = self._uses.get(tenant)
        if use is None:
            use = self._uses[tenant] = TenantUse()
        return use

    def admits(self, ticket: Ticket, now_s: float) -> bool:
        """A call arrives: whether it goes at once. If not, `wait` has to follow.

        Raises `LimitError` beyond its tenant's rates.
        """
        limits, use = self._limits(ticket.tenant), self.use(ticket.tenant)
        use.check_rate(limits, ticket.tokens, now_s)
        line = self._lines.get(ticket.model)
        if line is None:
            line = self._lines[ticket.model] = _Line(FairQueue(self._weights))
        if use.running >= limits.max_running or len(line.queue) or not self._has_room(ticket.model, now_s):
            return False
        use.enter(ticket.tokens)
        use.running += 1
        return True

    def wait(self, ticket: Ticket, now_s: float) -> Turns:
        """A call that does not go at once joins the queue, with its work. It waits, or is among those given up.

        Raises `LimitError` beyond its tenant's limit of waiting calls.
        """
        limits, use = self._limits(ticket.tenant), self.use(ticket.tenant)
        line = self._lines[ticket.model]
        if line.queue.waiting(ticket.tenant) >= limits.max_waiting:
            raise LimitError(
                f"{limits.max_waiting} calls of this tenant wait already, the most that may.",
                code="too_many_waiting", retry_after_s=max(1.0, line.rate.seconds(line.queue.work_s)),
            )  # fmt: skip
        use.enter(ticket.tokens)
        line.queue.push(ticket)
        shed = self._shed(line, ticket.tenant)
        return Turns(self.poll(ticket.model, now_s).admitted, shed)

    def poll(self, model: str, now_s: float) -> Turns:
        """Room may have come up: the next call goes. It takes room when it is placed; until then no other goes."""
        line = self._lines.get(model)
        if line is None or not len(line.queue):
            return NOBODY
        if line.placing is not None or not self._has_room(model, now_s):
            return NOBODY
        ticket = line.queue.pop(lambda tenant: self.use(tenant).running < self._limits(tenant).max_running)
        if ticket is None:
            return NOBODY
        self.use(ticket.tenant).running += 1
        line.placing = ticket
        line.left(ticket, now_s)
        return Turns((ticket,))

    def placed(self, ticket: Ticket, now_s: float) -> Turns:
        """An admitted call was placed. The next one may go, if there is room left."""
        line = self._lines[ticket.model]
        if line.placing is ticket:
            line.placing = None
        return self.poll(ticket.model, now_s)

    def left(self, ticket: Ticket, used_tokens: int | None) -> None:
        """An admitted call has ended. `used_tokens` replaces its predicted tokens in its tenant's share, if known."""
        self.use(ticket.tenant).running -= 1
        line = self._lines[ticket.model]
        if line.placing is ticket:
            line.placing = None
        if used_tokens is not None:
            line.queue.charge(ticket.tenant, used_tokens - ticket.tokens)

    def give_up(self, ticket: Ticket) -> None:
        """A waiting call's client has gone; no effect if it does not wait any more."""
        line = self._lines.get(ticket.model)
        if line is not None:
            line.queue.remove(ticket)

    def check(self, running: Iterable[Ticket]) -> None:
        """Assert the invariants; for tests."""
        for line in self._lines.values():
            line.queue.check()
        tickets = list(running)
        for name, use in self._uses.items():
            assert use.running == sum(ticket.tenant == name for ticket in tickets)

    def _shed(self, line: _Line, tenant: str) -> tuple[tuple[Ticket, OverloadedError], ...]:
        """Give up calls until nobody waits longer than the bound. One call of a tenant may always wait.

        The calls of one tenant may take longer than all together would, because others overtake them.
        """
        shed, queue = list[tuple[Ticket, OverloadedError]](), line.queue
        while queue.waiting(tenant) > 1 and line.tenant_wait_s(tenant) > self._max_wait_s:
            shed.append(self._give_up(line, queue.latest_of(tenant)))
        while len(queue) > queue.tenants and line.rate.seconds(queue.work_s) > self._max_wait_s:
            victim = queue.victim()
            assert victim is not None
            shed.append(self._give_up(line, victim))
        return tuple(shed)

    def _give_up(self, line: _Line, victim: Ticket) -> tuple[Ticket, OverloadedError]:
        line.queue.remove(victim)
        return victim, self._overloaded(line, victim.tenant)

    def _overloaded(self, line: _Line, tenant: str) -> OverloadedError:
        calls, wait_s = line.queue.waiting(tenant), line.tenant_wait_s(tenant)
        return OverloadedError(
            f"{calls} calls of this tenant wait for this model, about {wait_s:.0f} s; send the call again later.",
            retry_after_s=max(1.0, wait_s),
        )
