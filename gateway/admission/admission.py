"""Admission: what a tenant may use, which sessions may be live, what waits for its engine, and what is refused.

A synchronous core; each event carries its time. Both the gateway and the simulator drive it. A call's session may be
held first. Then the call is in the `Queue`: placed in a line, or until its tenant may have another one placed.
See docs/design/admission.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from math import inf
from typing import Final

from plait.backends.errors import LimitError, OverloadedError, PlaitError, SessionWaitingError
from plait.gateway.admission.backlog import Backlog, Waiting, rank_of
from plait.gateway.admission.lines import AHEAD_S, Lines
from plait.gateway.admission.session_gates import SessionGates
from plait.gateway.admission.tenants import TenantLimits, TenantUse
from plait.gateway.fleet.router import Router
from plait.gateway.timer import At
from plait.policy.admission.fair_shares import FairShares
from plait.policy.sessions.session_gate import CHAT_TOKENS
from plait.policy.types import Call

KEPT = "It keeps its place: send it again."

MOST_AWAY_S = 60.0
"""No client is told to stay away for longer. SDKs do not wait longer for a retry."""

GRACE_S: Final = 10.0
"""A place is kept so much longer than the client was told to stay away."""

MOST_KEPT: Final = 10_000
"""So many places are kept. Beyond, the oldest are given up."""

DECODE_SHARE = 1 / 16
"""The part of its decode that a call's work counts: engines decode many calls at once. `DrainRate` corrects it."""

COLD = 4.0
"""While no call has left a queue, as much work may wait there as is predicted to take so many times the bound. Bursts
of short prompts with long answers take a third of what is predicted: engines decode more of them at once.
"""


class Admission:
    """The calls that wait in the gateway: first their sessions for room in the caches, then they for an engine.

    `limits` returns the limits of a tenant. `weights` are the tenants' shares (default 1); they may change. Prompts of
    fewer than `chat_tokens` that extend no other are never held for their sessions' sake; infinite: none is. `at`,
    `max_wait_s` and `ahead_s` are those of the `queue`.
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
        chat_tokens: float = CHAT_TOKENS,
    ) -> None:
        shares = FairShares(weights)
        self._uses: defaultdict[str, TenantUse] = defaultdict(TenantUse)
        self.queue = Queue(
            router,
            at,
            shares,
            limits,
            self._uses,
            max_wait_s=max_wait_s,
            ahead_s=ahead_s,
            on_sent=self._sent,
            on_given_up=self._given_up,
        )
        self.sessions = SessionGates(router, at, shares.weight, self._freed, chat_tokens)
        self._limits = limits
        self._places = KeptPlaces()
        self._numbers = count()

    # What waits.

    def waiting(self, model: str) -> int:
        """How many calls wait for an engine that serves a model."""
        return self.queue.backlogs[model].length if model in self.queue.backlogs else 0

    def outlook(self, call: Waiting) -> tuple[int, float]:
        """A waiting call's place among those of its tenant, and the seconds until it goes, as predicted."""
        if call.is_held:
            return self.sessions.outlook(call)
        return self.queue.backlogs[call.call.model].outlook(call)

    def has_place(self, call: Waiting) -> bool:
        """Whether a call was here, and has counted for its tenant's rates."""
        return self._places.has(call)

    def use(self, tenant: str) -> TenantUse:
        """What a tenant uses now."""
        return self._uses[tenant]

    # Events.

    def enter(self, call: Waiting, now_s: float) -> None:
        """A call arrives. It is sent at once, or waits, or is given up with an error. `left` or `gone` has to follow.

        Raises `LimitError` beyond its tenant's limits, `NotFoundError` or `NoEngineError` if no engine takes it.
        """
        use, limits = self._uses[call.tenant], self._limits(call.tenant)
        number = self._places.take(call, now_s) if self._places.kept else None
        call.is_back = number is not None
        if number is None:
            if not call.is_leased:
                use.check_rate(limits, call.tokens, now_s)
            number = next(self._numbers)
        call.number = number
        is_new = not call.is_back  # another one has counted before, and was taken
        passes = self.sessions.arrive(call, now_s)
        try:
            if passes:
                self.queue.enter(call, limits, now_s)
            elif not self.sessions.has_begun(call):
                others = self.sessions.waiting(call) - 1
                self.queue.check_limit(call, self.queue.waiting(call.tenant, call.call.model) + others)
        except PlaitError:
            self.sessions.gone(call, now_s)
            raise
        call.is_back = call.is_back or not passes
        if is_new and (limits.calls_per_s < inf or limits.tokens_per_s < inf):
            use.enter(call.tokens)
        if call.is_sent:
            if call.turn is not None:
                call.turn.gate.sent(call.turn)
        elif is_new and passes:
            self.queue.shed(call, now_s)

    def left(self, call: Waiting, used_tokens: int | None, now_s: float) -> None:
        """A call that was sent has ended, and its booking. `used_tokens` replaces its predicted tokens, if known."""
        self.queue.left(call, used_tokens, now_s)
        self.sessions.left(call, used_tokens, now_s)

    def gone(self, call: Waiting, now_s: float) -> None:
        """The client of a call has gone before it was sent, or in that moment."""
        if call.is_sent:
            self.queue.unsent(call, now_s)
        elif call.error is None and not call.is_held:
            self.queue.leave(call, now_s)
        self.sessions.gone(call, now_s)

    def leave(self, call: Waiting, now_s: float) -> LimitError:
        """A call that waits goes, and may come back to its place; returns what its client is to be told."""
        position, expected_s = self.outlook(call)
        again_s = min(max(1.0, expected_s), MOST_AWAY_S)
        self._places.keep(call, now_s + again_s)
        is_held, where = call.is_held, f"at place {position} of this tenant's, for about {expected_s:.0f} s more"
        self.gone(call, now_s)
        if is_held:
            text = f"The session waits until its context fits into the engines' caches, {where}."
            return SessionWaitingError(f"{text} {KEPT}", position=position, retry_after_s=again_s)
        return LimitError(f"The call waits for an engine, {where}. {KEPT}", code="waiting", retry_after_s=again_s)

    def refine(self, waiting: Waiting, call: Call) -> None:
        """The objectives of a call have changed while it waits."""
        waiting.call = call
        if not waiting.is_sent and waiting.error is None and not waiting.is_held:
            self.queue.refine(waiting)

    def limits_changed(self, now_s: float) -> None:
        """Tenants may have more running."""
        for tenant in list(self.queue.busy()):
            self.queue.place_held(tenant, now_s)

    def check(self, entered: Iterable[Waiting]) -> None:
        """Assert the invariants, with all calls that have entered and not left; for tests."""
        calls = list(entered)
        self.queue.check([call for call in calls if not call.is_held])
        self.sessions.check(calls)
        running = {call.tenant for call in calls if call.booking is not None}
        assert all(tenant in running for tenant, use in self._uses.items() if use.running)

    def _freed(self, call: Waiting, now_s: float) -> None:
        """A call's session is not held any more."""
        try:
            self.queue.enter(call, self._limits(call.tenant), now_s)
        except PlaitError as error:
            call.error = error
            self._given_up(call, now_s)
            return
        if call.is_sent:
            self._sent(call, now_s)

    def _sent(self, call: Waiting, _now_s: float) -> None:
        """A call that has waited is to be sent."""
        if call.turn is not None:
            call.turn.gate.sent(call.turn)
        if call.tell is not None:
            call.tell()

    def _given_up(self, call: Waiting, now_s: float) -> None:
        """A call that has waited is not to be sent."""
        self.sessions.gone(call, now_s)
        if call.tell is not None:
            call.tell()


class KeptPlaces:
    """The numbers of calls that have left and may come back: their clients could not be kept waiting."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], tuple[int, float]] = {}  # number and time of expiry, by the call

    def keep(self, call: Waiting, until_s: float) -> None:
        """The call has left. Its client may come back until some seconds after this time."""
        if len(self.kept) >= MOST_KEPT:
            del self.kept[next(iter(self.kept))]
        self.kept[_same(call)] = call.number, until_s + GRACE_S

    def has(self, call: Waiting) -> bool:
        """Whether the call has been here."""
        return bool(self.kept) and _same(call) in self.kept

    def take(self, call: Waiting, now_s: float) -> int | None:
        """The number of the call when it came first; None if it has not been here, or too long ago."""
        number, until_s = self.kept.pop(_same(call), (None, 0.0))
        return number if now_s <= until_s else None


def _same(call: Waiting) -> tuple[object, ...]:
    """What is equal for a call that is sent again."""
    asked = call.call
    last = asked.block_hashes[-1] if len(asked.block_hashes) else None
    return call.tenant, asked.model, asked.prompt_tokens, asked.output_limit, asked.prompt_hash, last


class Queue:
    """The calls that wait for engines. No call is to wait longer than `max_wait_s`, as predicted.

    An engine is sent prompts of `ahead_s` (infinite: no call waits for its engine). `limits` returns those of a tenant,
    and `uses` has what each uses. `at` schedules what comes later. `on_sent` is called with a call that has waited when
    it is to be sent, and `on_given_up` with one that has an error now. `backlogs` has what waits or has waited, by
    model.
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
        self._lines = Lines(router, at, shares, ahead_s, on_sent=self._sent, on_failed=self._failed)
        self._shares = shares
        self._router = router
        self._limits = limits
        self._uses = uses
        self._max_wait_s = max_wait_s
        self._on_sent = on_sent
        self._on_given_up = on_given_up
        self._busy = set[str]()  # and tenants that were busy lately
        self._held: dict[str, deque[Waiting]] = {}  # calls beyond their tenants' `max_running`, which are not placed

    def waiting(self, tenant: str, model: str) -> int:
        """How many calls of a tenant wait for a model."""
        return self.backlogs[model].waiting(tenant) if model in self.backlogs else 0

    def most_waiting(self, tenant: str) -> int:
        """How many calls of a tenant wait for the model for which most wait."""
        return max((backlog.waiting(tenant) for backlog in self.backlogs.values()), default=0)

    def busy(self) -> Collection[str]:
        """The tenants that have calls here."""
        self._busy = {tenant for tenant in self._busy if self.wants(tenant)}
        return self._busy

    def wants(self, tenant: str) -> int:
        """How many calls of a tenant are placed, or would be with a higher `max_running`."""
        return self._uses[tenant].running + len(self._held.get(tenant, ()))

    # Events.

    def enter(self, call: Waiting, limits: TenantLimits, now_s: float) -> None:
        """A call is placed, and sent at once, or it waits. Raises `PlaitError` if no engine takes it.

        `limits` are those of its tenant.
        """
        use = self._uses[call.tenant]
        self._busy.add(call.tenant)
        if use.running < limits.max_running:
            self._lines.place(call, now_s)
            use.running += 1
        if not call.is_sent:
            self._wait(call, now_s)

    def left(self, call: Waiting, used_tokens: int | None, now_s: float) -> None:
        """A call that was sent has ended, and its booking. `used_tokens` replaces its predicted tokens, if known."""
        self._shares.correct(call.tenant, 0 if used_tokens is None else used_tokens - call.tokens)
        assert call.booking is not None
        self._lines.room.left(call.booking.placement.engine_id, call.tenant)
        self._uses[call.tenant].running -= 1
        if self._held:
            self.place_held(call.tenant, now_s)

    def unsent(self, call: Waiting, now_s: float) -> None:
        """The client of a call has gone in the moment in which it was sent."""
        call.is_sent = False
        self._shares.correct(call.tenant, -call.tokens)
        self._lines.room.left(call.engine_id, call.tenant)
        self._lines.leave(call, now_s)
        self._uses[call.tenant].running -= 1
        self.place_held(call.tenant, now_s)

    def leave(self, call: Waiting, now_s: float) -> None:
        """A waiting call does not wait any more, and is not sent."""
        self.backlogs[call.call.model].remove(call)
        if call.booking is None:
            self._held[call.tenant].remove(call)
        else:
            self._lines.leave(call, now_s)
            self._uses[call.tenant].running -= 1
            self.place_held(call.tenant, now_s)

    def refine(self, call: Waiting) -> None:
        """The objectives of a waiting call have changed."""
        if call.booking is not None:
            self._lines.refine(call)
        call.rank = rank_of(call.call)
        self.backlogs[call.call.model].mark(call)

    def shed(self, call: Waiting, now_s: float) -> None:
        """A new call waits. Give up calls until nobody is expected to wait longer than the bound."""
        backlog = self.backlogs[call.call.model]
        most_s = self._max_wait_s if backlog.is_measured else COLD * self._max_wait_s
        while (victim := backlog.excess(call.tenant, most_s)) is not None:
            self.leave(victim, now_s)
            calls, wait_s = backlog.waiting(victim.tenant), backlog.tenant_wait_s(victim.tenant)
            text = f"{calls} calls of this tenant wait for this model, about {wait_s:.0f} s; send the call again later."
            self._give_up(victim, OverloadedError(text, retry_after_s=max(1.0, wait_s)), now_s)

    def check_limit(self, call: Waiting, waiting: int) -> None:
        """Raise `LimitError` if no further call of the tenant may wait beside those that are `waiting`."""
        most = self._limits(call.tenant).max_waiting
        if waiting >= most and not call.is_back:
            backlog = self.backlogs.get(call.call.model)
            wait_s = backlog.tenant_wait_s(call.tenant) if backlog is not None and backlog.waiting(call.tenant) else 0.0
            raise LimitError(
                f"{most} calls of this tenant wait already, the most that may.",
                code="too_many_waiting", retry_after_s=max(1.0, wait_s),
            )  # fmt: skip

    def check(self, calls: Sequence[Waiting]) -> None:
        """Assert the invariants, with all calls that have entered and not left; for tests."""
        waiting = [call for call in calls if not call.is_sent and call.error is None]
        assert len(waiting) == sum(backlog.length for backlog in self.backlogs.values())
        for backlog in self.backlogs.values():
            backlog.check()
        self._lines.check(call for call in waiting if call.booking is not None)
        placed = Counter(call.tenant for call in calls if call.booking is not None)
        assert all(self._uses[tenant].running == running for tenant, running in placed.items())

    # Waiting.

    def _wait(self, call: Waiting, now_s: float) -> None:
        """A call waits: in the line of its engine, or until its tenant may have another one placed."""
        try:
            self.check_limit(call, self.waiting(call.tenant, call.call.model))
        except LimitError:
            if call.booking is not None:
                self._lines.leave(call, now_s)
                self._uses[call.tenant].running -= 1
            raise
        backlog = self.backlogs.get(call.call.model)
        if backlog is None:
            engines = len(self._router.models.able(call.call.model))
            backlog = self.backlogs[call.call.model] = Backlog(self._shares, engines)
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
        self._on_sent(call, now_s)

    def _failed(self, call: Waiting, error: PlaitError, now_s: float) -> None:
        """No engine takes a call that has waited."""
        self.backlogs[call.call.model].remove(call)
        self._give_up(call, error, now_s)
        self._uses[call.tenant].running -= 1
        self.place_held(call.tenant, now_s)

    def place_held(self, tenant: str, now_s: float) -> None:
        """Place the calls that a tenant may have running now, as after one that is gone."""
        use, held = self._uses[tenant], self._held.get(tenant)
        while held and use.running < self._limits(tenant).max_running:
            call = held.popleft()
            try:
                self._lines.place(call, now_s)
            except PlaitError as error:
                self.backlogs[call.call.model].remove(call)
                self._give_up(call, error, now_s)
                continue
            use.running += 1
            self._sent(call, now_s) if call.is_sent else self._lines.join(call, now_s)

    def _give_up(self, call: Waiting, error: PlaitError, now_s: float) -> None:
        call.error = error
        self._on_given_up(call, now_s)


def _predicted_s(router: Router, call: Waiting) -> float:
    """The engine time that a call counts with while it waits."""
    engines = router.models.able(call.call.model)
    if not engines:
        return 0.0
    costs, prompt_tokens = engines[0].cost_model, call.call.prompt_tokens
    cached_tokens = 0 if call.booking is None else call.booking.placement.cached_tokens
    prefill_s = costs.prefill_time_s(max(0, prompt_tokens - cached_tokens), cached_tokens)
    return prefill_s + DECODE_SHARE * costs.decode_time_s(call.output_tokens, prompt_tokens)
