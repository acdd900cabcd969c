"""The queue: all calls that wait for engines, bounded in predicted seconds.

A synchronous core: each event carries its time. A waiting call is in its model's `Backlog` (how much waits, how fast it
drains), and in one more place: the line of its engine if it is placed, otherwise `held` until its tenant may have
another call running. Beyond the bound, a call gets a 429. See docs/design/admission.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plait.backends.errors import LimitError, OverloadedError, PlaitError, ReachedLimit
from plait.gateway.admission.backlog import Backlog, Waiting
from plait.gateway.admission.lines import Lines
from plait.gateway.admission.tenants import TenantLimits, TenantUse
from plait.gateway.fleet.router import Router
from plait.gateway.timed_events import At
from plait.policy.admission.conversations import Conversations
from plait.policy.admission.fair_shares import FairShares
from plait.policy.admission.line import TenantCalls
from plait.policy.order import rank_of

DECODE_SHARE = 1 / 16
"""A call's work counts only this part of its decode, because engines decode many calls at once. `DrainRate` corrects
the error of this estimate.
"""

COLD = 4.0
"""The bound of a backlog is this many times larger until its drain rate is measured. Bursts of short prompts with long
answers drain in a third of the prediction, because engines decode more of them at once.
"""


class Queue:
    """The calls that wait for engines. No call should wait longer than `max_wait_s`, by prediction.

    `ahead_s` is as in `Room`. `limits` returns a tenant's limits, and `uses` has what each tenant uses. `on_sent` is
    called with a waiting call that was sent, `on_given_up` with one that got an error. `backlogs` are by model.
    """

    def __init__(
        self,
        router: Router,
        at: At,
        shares: FairShares,
        limits: Callable[[str], TenantLimits],
        uses: Mapping[str, TenantUse],
        *,
        max_wait_s: float,
        ahead_s: float,
        on_sent: Callable[[Waiting, float], None],
        on_given_up: Callable[[Waiting, float], None],
    ) -> None:
        self.backlogs: dict[str, Backlog] = {}
        self.held: dict[str, TenantCalls[Waiting]] = {}
        self.lines = Lines(router, at, shares, uses, ahead_s, on_sent=self._sent, on_failed=self._failed)
        self._shares = shares
        self._conversations = Conversations()
        self._router = router
        self._limits = limits
        self._uses = uses
        self._max_wait_s = max_wait_s
        self._on_sent = on_sent
        self._on_given_up = on_given_up

    def waiting(self, tenant: str, model: str) -> int:
        """How many calls of a tenant wait for a model."""
        return self.backlogs[model].waiting(tenant) if model in self.backlogs else 0

    def most_waiting(self, tenant: str) -> int:
        """How many calls of a tenant wait for the model for which most of them wait."""
        return max((backlog.waiting(tenant) for backlog in self.backlogs.values()), default=0)

    def wants(self, tenant: str) -> int:
        """How many calls of a tenant are placed, or would be with a higher `max_running`."""
        return self._uses[tenant].running + (self.held[tenant].waiting if tenant in self.held else 0)

    # Events.

    def wait(self, call: Waiting, now_s: float) -> None:
        """A call begins to wait: in its engine's line, or until its tenant may have another call running.

        Raises `LimitError` if no further call of the tenant may wait. Other calls may get an error to make room.
        """
        try:
            self.check_limit(call, self.waiting(call.tenant, call.call.model))
        except LimitError:
            if call.booking is not None:
                self.lines.leave(call, now_s)
            raise
        backlog = self.backlogs.get(call.call.model)
        if backlog is None:
            engines = len(self._router.models.able(call.call.model))
            backlog = self.backlogs[call.call.model] = Backlog(self._shares, self._conversations, engines)
        call.prefill_s, decode_s = _predicted_s(self._router, call)
        call.work_s = call.prefill_s + decode_s
        call.find_rank()
        backlog.add(call)
        if call.booking is None:
            call.wait_for("max_running", now_s)
            self.held.setdefault(call.tenant, TenantCalls()).add(call)
        else:
            self.lines.join(call, now_s)
        if not call.is_back:
            self._shed(call, now_s)

    def unsent(self, call: Waiting, now_s: float) -> None:
        """The client of a call has gone after `on_sent`, but before the engine got the call."""
        self._shares.correct(call.tenant, -call.tokens)
        self.lines.unsent(call, now_s)
        self.place_held(call.tenant, now_s)

    def leave(self, call: Waiting, now_s: float) -> None:
        """A waiting call leaves unsent."""
        self.backlogs[call.call.model].remove(call)
        if call.booking is None:
            self.held[call.tenant].remove(call)
        else:
            self.lines.leave(call, now_s)
            self.place_held(call.tenant, now_s)

    def refine(self, call: Waiting, now_s: float) -> None:
        """The objectives of a waiting call have changed."""
        if call.booking is not None:
            self.lines.refine(call, now_s)
        else:
            self.held[call.tenant].change(call, rank_of(call.call.slo, call.call.objective), call.precedence)
        self.backlogs[call.call.model].mark(call)

    def _shed(self, call: Waiting, now_s: float) -> None:
        """A new call waits: refuse calls until no call is predicted to wait longer than the bound."""
        backlog = self.backlogs[call.call.model]
        most_s = self._max_wait_s if backlog.is_measured else COLD * self._max_wait_s
        while (victim := backlog.excess(call.tenant, most_s)) is not None:
            self.leave(victim, now_s)
            calls, wait_s = backlog.waiting(victim.tenant), backlog.tenant_wait_s(victim.tenant)
            text = f"{calls} calls of this tenant wait for this model, about {wait_s:.0f} s; send the call again later."
            reached = ReachedLimit("max_wait_s", self._max_wait_s, wait_s)
            self.give_up(victim, OverloadedError(text, retry_after_s=max(1.0, wait_s), reached=reached), now_s)

    def check_limit(self, call: Waiting, waiting: int) -> None:
        """Raise `LimitError` if `waiting` calls are the most that the tenant may have waiting."""
        most = self._limits(call.tenant).max_waiting
        if waiting >= most and not call.is_back:
            backlog = self.backlogs.get(call.call.model)
            wait_s = backlog.tenant_wait_s(call.tenant) if backlog is not None and backlog.waiting(call.tenant) else 0.0
            text = f"{most} calls of this tenant wait already, the most that may."
            reached = ReachedLimit("max_waiting", most, waiting)
            raise LimitError(text, code="too_many_waiting", retry_after_s=max(1.0, wait_s), reached=reached)

    def _sent(self, call: Waiting, now_s: float) -> None:
        """A waiting call was sent."""
        self.backlogs[call.call.model].sent(call, now_s)
        self._on_sent(call, now_s)

    def _failed(self, call: Waiting, error: PlaitError, now_s: float) -> None:
        """No engine takes a waiting call any more."""
        self.backlogs[call.call.model].remove(call)
        self.give_up(call, error, now_s)
        self.place_held(call.tenant, now_s)

    def place_held(self, tenant: str, now_s: float) -> None:
        """Place a tenant's calls in `held`, as many as may run now."""
        use, held = self._uses[tenant], self.held.get(tenant)
        while held and held.waiting and use.running < self._limits(tenant).max_running:
            call = held.next_call
            held.serve(call)
            try:
                self.lines.place(call, now_s)
            except PlaitError as error:
                self.backlogs[call.call.model].remove(call)
                self.give_up(call, error, now_s)
                continue
            self._sent(call, now_s) if call.is_sent else self.lines.join(call, now_s)

    def give_up(self, call: Waiting, error: PlaitError, now_s: float) -> None:
        """Give an error to a call that has left the queue."""
        call.error = error
        self._on_given_up(call, now_s)


def _predicted_s(router: Router, call: Waiting) -> tuple[float, float]:
    """The engine times that the prefill and the decode of a waiting call count as."""
    engines = router.models.able(call.call.model)
    if not engines:
        return 0.0, 0.0
    costs, prompt_tokens = engines[0].cost_model, call.call.prompt_tokens
    cached_tokens = 0 if call.booking is None else call.booking.placement.cached_tokens
    prefill_s = costs.prefill_time_s(max(0, prompt_tokens - cached_tokens), cached_tokens)
    return prefill_s, DECODE_SHARE * costs.decode_time_s(call.output_tokens, prompt_tokens)
