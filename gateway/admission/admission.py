"""Admission: what a tenant may use, what waits for its engine, and what is refused as too much waits.

A synchronous core; each event carries its time. Both the gateway and the simulator drive it.
See docs/design/admission.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from plait.backends.errors import LimitError, OverloadedError, PlaitError
from plait.gateway.admission.backlog import Backlog
from plait.gateway.admission.kept_places import KeptPlaces
from plait.gateway.admission.lines import Lines
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.admission.tenant_limits import TenantLimits, TenantUse
from plait.gateway.admission.waiting import Waiting, rank_of
from plait.gateway.fleet.router import Router
from plait.gateway.timer import At
from plait.policy.admission.fair_shares import FairShares
from plait.policy.types import Call

DECODE_SHARE = 1 / 16
"""The part of its decode that a call's work counts: engines decode many calls at once. `DrainRate` corrects it."""


COLD = 4.0
"""While no call has left a queue, as much work may wait there as is predicted to take so many times the bound. Bursts
of short prompts with long answers take a third of what is predicted: engines decode more of them at once.
"""


MOST_AWAY_S = 60.0
"""No client is told to stay away for longer. SDKs do not wait longer for a retry."""


class Admission:
    """The calls that wait in the gateway. No call is to wait longer than `max_wait_s`, as predicted.

    An engine is sent prompts of `ahead_s` (infinite: no call waits for its engine). `limits` returns the limits of a
    tenant. `weights` are the tenants' shares (default 1); they may change. `at` schedules what comes later. `backlogs`
    has what waits or has waited, by model.
    """

    def __init__(
        self,
        router: Router,
        at: At,
        limits: Callable[[str], TenantLimits],
        *,
        max_wait_s: float,
        weights: Mapping[str, float] | None = None,
        ahead_s: float = AHEAD_S,
    ) -> None:
        self._shares = FairShares(weights)
        self._lines = Lines(router, at, self._shares, ahead_s, on_sent=self._sent, on_failed=self._failed)
        self._router = router
        self._limits = limits
        self._max_wait_s = max_wait_s
        self._held: dict[str, deque[Waiting]] = {}  # calls beyond their tenants' `max_running`, which are not placed
        self.backlogs: dict[str, Backlog] = {}
        self._uses: dict[str, TenantUse] = {}
        self._places = KeptPlaces()
        self._numbers = count()

    # What waits.

    def waiting(self, model: str) -> int:
        """How many calls wait for a model."""
        return self.backlogs[model].length if model in self.backlogs else 0

    def use(self, tenant: str) -> TenantUse:
        """What a tenant uses now."""
        use = self._uses.get(tenant)
        if use is None:
            use = self._uses[tenant] = TenantUse()
        return use

    # Events.

    def enter(self, call: Waiting, now_s: float) -> None:
        """A call arrives. It is sent at once, or waits, or is given up with an error. `left` or `gone` has to follow.

        Raises `LimitError` beyond its tenant's limits, `NotFoundError` or `NoEngineError` if no engine takes it.
        """
        limits, use, number = self._limits(call.tenant), self.use(call.tenant), self._places.take(call, now_s)
        call.is_back = number is not None
        if number is None:
            use.check_rate(limits, call.tokens, now_s)
            number = next(self._numbers)
        call.number = number
        may_run = use.running < limits.max_running
        if may_run:
            self._lines.place(call, now_s)
            use.running += 1
        if not call.is_sent:
            self._wait(call, limits, now_s)
        if call.is_back:
            return  # it has counted before, and was taken
        use.enter(call.tokens)
        if not call.is_sent:
            self._shed(call, now_s)

    def left(self, call: Waiting, used_tokens: int | None, now_s: float) -> None:
        """A call that was sent has ended, and its booking. `used_tokens` replaces its predicted tokens, if known."""
        self._shares.correct(call.tenant, 0 if used_tokens is None else used_tokens - call.tokens)
        self._lines.room.left(call.engine_id, call.tenant)
        self._ran(call.tenant, now_s)

    def gone(self, call: Waiting, now_s: float) -> None:
        """The client of a call has gone before it was sent, or in that moment."""
        if call.is_sent:
            call.is_sent = False
            self._shares.correct(call.tenant, -call.tokens)
            self._lines.room.left(call.engine_id, call.tenant)
            self._lines.leave(call, now_s)
            self._ran(call.tenant, now_s)
        elif call.error is None:
            self._take_out(call, now_s)

    def leave(self, call: Waiting, now_s: float) -> LimitError:
        """A call that waits goes, and may come back to its place; returns what its client is to be told."""
        position, expected_s = self.backlogs[call.call.model].outlook(call)
        again_s = min(max(1.0, expected_s), MOST_AWAY_S)
        self._places.keep(call, now_s + again_s)
        self._take_out(call, now_s)
        text = f"The call waits for an engine, at place {position} of this tenant's, for about {expected_s:.0f} s more."
        return LimitError(f"{text} It keeps its place: send it again.", code="waiting", retry_after_s=again_s)

    def refine(self, waiting: Waiting, call: Call) -> None:
        """The objectives of a call have changed while it waits."""
        waiting.call = call
        if waiting.is_sent or waiting.error is not None:
            return
        if waiting.booking is not None:
            self._lines.refine(waiting)
        waiting.rank = rank_of(call)
        self.backlogs[call.model].mark(waiting)

    def check(self, entered: Iterable[Waiting]) -> None:
        """Assert the invariants, with all calls that have entered and not left; for tests."""
        calls = list(entered)
        waiting = [call for call in calls if not call.is_sent and call.error is None]
        assert len(waiting) == sum(backlog.length for backlog in self.backlogs.values())
        for backlog in self.backlogs.values():
            backlog.check()
        self._lines.check(call for call in waiting if call.booking is not None)
        placed = Counter(call.tenant for call in calls if call.booking is not None)
        assert {name: use.running for name, use in self._uses.items() if use.running} == placed

    # Waiting.

    def _wait(self, call: Waiting, limits: TenantLimits, now_s: float) -> None:
        """A call waits: in the line of its engine, or until its tenant may have another one placed."""
        backlog = self.backlogs.get(call.call.model)
        if backlog is None:
            engines = len(self._router.models.able(call.call.model))
            backlog = self.backlogs[call.call.model] = Backlog(self._shares, engines)
        if backlog.waiting(call.tenant) >= limits.max_waiting and not call.is_back:
            if call.booking is not None:
                self._lines.leave(call, now_s)
                self.use(call.tenant).running -= 1
            raise LimitError(
                f"{limits.max_waiting} calls of this tenant wait already, the most that may.",
                code="too_many_waiting", retry_after_s=max(1.0, backlog.tenant_wait_s(call.tenant)),
            )  # fmt: skip
        call.work_s = _predicted_s(self._router, call)
        call.rank, call.priority = rank_of(call.call), call.call.priority
        backlog.add(call)
        if call.booking is None:
            held = self._held.setdefault(call.tenant, deque())
            held.append(call)
            if call.is_back:
                self._held[call.tenant] = deque(sorted(held, key=lambda one: one.number))
        else:
            self._lines.join(call, now_s)

    def _sent(self, call: Waiting, now_s: float) -> None:
        """A call that has waited is to be sent."""
        self.backlogs[call.call.model].sent(call, now_s)
        if call.tell is not None:
            call.tell()

    def _failed(self, call: Waiting, error: PlaitError, now_s: float) -> None:
        """No engine takes a call that has waited."""
        self.backlogs[call.call.model].remove(call)
        _give_up(call, error)
        self._ran(call.tenant, now_s)

    def _take_out(self, call: Waiting, now_s: float) -> None:
        """A waiting call does not wait any more, and is not sent."""
        self.backlogs[call.call.model].remove(call)
        if call.booking is None:
            self._held[call.tenant].remove(call)
        else:
            self._lines.leave(call, now_s)
            self._ran(call.tenant, now_s)

    def _ran(self, tenant: str, now_s: float) -> None:
        """A placed call is gone: one more of its tenant may be placed."""
        use, limits, held = self.use(tenant), self._limits(tenant), self._held.get(tenant)
        use.running -= 1
        while held and use.running < limits.max_running:
            call = held.popleft()
            try:
                self._lines.place(call, now_s)
            except PlaitError as error:
                self.backlogs[call.call.model].remove(call)
                _give_up(call, error)
                continue
            use.running += 1
            self._sent(call, now_s) if call.is_sent else self._lines.join(call, now_s)

    def _shed(self, call: Waiting, now_s: float) -> None:
        """Give up calls until nobody is expected to wait longer than the bound."""
        backlog = self.backlogs[call.call.model]
        most_s = self._max_wait_s if backlog.is_measured else COLD * self._max_wait_s
        while (victim := backlog.excess(call.tenant, most_s)) is not None:
            self._take_out(victim, now_s)
            calls, wait_s = backlog.waiting(victim.tenant), backlog.tenant_wait_s(victim.tenant)
            text = f"{calls} calls of this tenant wait for this model, about {wait_s:.0f} s; send the call again later."
            _give_up(victim, OverloadedError(text, retry_after_s=max(1.0, wait_s)))


def _give_up(call: Waiting, error: PlaitError) -> None:
    call.error = error
    if call.tell is not None:
        call.tell()


def _predicted_s(router: Router, call: Waiting) -> float:
    """The engine time that a call counts with while it waits."""
    engines = router.models.able(call.call.model)
    if not engines:
        return 0.0
    costs, prompt_tokens = engines[0].cost_model, call.call.prompt_tokens
    cached_tokens = 0 if call.booking is None else call.booking.placement.cached_tokens
    prefill_s = costs.prefill_time_s(max(0, prompt_tokens - cached_tokens), cached_tokens)
    return prefill_s + DECODE_SHARE * costs.decode_time_s(call.output_tokens, prompt_tokens)
