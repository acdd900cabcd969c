"""Admission: tenants' limits, held sessions, the queue before the engines, and refusals.

A synchronous core: each event carries its time, and the gateway or the simulator drives it.

In: a call arrives (`enter`), changes its objectives (`refine`), and ends: sent (`left`), given up by its client
(`gone`), or told to retry (`leave`). Out: `call.is_sent` or `call.error`, and `call.tell()` when a waiting call gets
either.

A call goes through these stages: tenant's rates, session gate (docs/design/sessions.md), tenant's running calls,
placement, the line of its engine (`Lines`), sent. Each stage may pass the call on at once. See
docs/design/admission.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import count
from math import inf
from typing import Final

import structlog

from plait.backends.errors import LimitError, PlaitError, ReachedLimit, SessionWaitingError
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.queue import Queue
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.admission.tenants import TenantLimits, TenantUse
from plait.gateway.asgi import MOST_RETRY_AFTER_S
from plait.gateway.fleet.router import Router
from plait.gateway.timed_events import At
from plait.policy.admission.fair_shares import FairShares
from plait.policy.sessions.session_gate import CHAT_TOKENS, SessionGate, Turn
from plait.policy.sessions.worth import Caches
from plait.policy.types import Call

KEPT = "It keeps its place: send it again."

GRACE_S: Final = 10.0
"""A place in the queue is kept for so much longer than the Retry-After that the client got."""

MOST_KEPT: Final = 10_000
"""The most places that are kept. Beyond it, the oldest are dropped."""

LOOK_S: Final = 0.25
"""The interval at which the gates look for room while sessions are held: idle sessions expire without an event."""

LINES_PART: Final = 0.5
"""Lines of batches use this part of the buckets of their tenant's rates, and its other calls all of them."""

log = structlog.get_logger(__name__)


class Admission:
    """Admission of one gateway.

    `limits` returns a tenant's limits. `weights` (default 1) may change. `chat_tokens` and `part` are as in
    `SessionGates`. `at`, `max_wait_s` and `ahead_s` are as in `Queue`.
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
        part: Callable[[str], float] = lambda _model: 1.0,
    ) -> None:
        self.shares = FairShares(weights)
        self._uses: defaultdict[str, TenantUse] = defaultdict(TenantUse)
        self.queue = Queue(
            router,
            at,
            self.shares,
            limits,
            self._uses,
            max_wait_s=max_wait_s,
            ahead_s=ahead_s,
            on_sent=self._sent,
            on_given_up=self._given_up,
        )
        self.sessions = SessionGates(router, at, self.shares.weight, self._freed, chat_tokens, part=part)
        self._lines = self.queue.lines
        self._limits = limits
        self._busy = set[str]()  # tenants with calls here, and some that had calls when `busy` last looked
        self._places = KeptPlaces()
        self._numbers = count()
        self._paced: dict[Waiting, float] = {}  # when each call that waits for its tenant's rates may go on
        self._at = at

    # What waits.

    def waiting(self, model: str) -> int:
        """How many calls wait for an engine that serves a model."""
        return self.queue.backlogs[model].length if model in self.queue.backlogs else 0

    def outlook(self, call: Waiting, now_s: float) -> tuple[int, float]:
        """(a waiting call's place among its tenant's, predicted seconds until it is sent)."""
        if call.is_held:
            return self.sessions.outlook(call)
        if call in self._paced:
            before = [one for one in self._paced if one.tenant == call.tenant].index(call)
            return before + 1, self._paced[call] - now_s
        return self.queue.backlogs[call.call.model].outlook(call)

    def has_place(self, call: Waiting) -> bool:
        """Whether the call is a retry that keeps its place: it has counted for its tenant's rates already."""
        return self._places.has(call)

    def busy(self) -> Collection[str]:
        """The tenants that have calls here."""
        self._busy = {tenant for tenant in self._busy if self.queue.wants(tenant)}
        return self._busy

    # Events.

    def enter(self, call: Waiting, now_s: float) -> None:
        """A call arrives. It is sent at once, waits, or gets an error. `left` or `gone` has to follow.

        Raises `LimitError` beyond its tenant's limits, `NotFoundError` or `NoEngineError` if no engine takes it. A call
        of a program waits for its tenant's rates instead: a refusal would lose what the program has computed.
        """
        use, limits = self._uses[call.tenant], self._limits(call.tenant)
        number = self._places.take(call, now_s) if self._places.kept else None
        is_new = number is None  # a retry has passed the limits already, so none is asked again
        call.number, call.is_back = next(self._numbers) if number is None else number, not is_new
        has_rates = limits.has_rates or use.has_rates
        if is_new and not call.is_leased and has_rates and self._is_paced(call, now_s):
            return
        if call.call.is_line:
            self._enter_line(call, use, limits, now_s)
            return
        passes = self.sessions.arrive(call, now_s)
        try:
            if passes:
                self._busy.add(call.tenant)
                if use.running < limits.max_running:
                    self._lines.place(call, now_s)
                if not call.is_sent:
                    self.queue.wait(call, now_s)
            elif not self.sessions.has_begun(call):
                others = self.sessions.waiting(call) - 1
                self.queue.check_limit(call, self.queue.waiting(call.tenant, call.call.model) + others)
        except PlaitError:
            self.sessions.gone(call, now_s)
            raise
        call.is_back = call.is_back or not passes
        if is_new and limits.has_rates:
            use.enter(call.tokens)
        if call.is_sent and call.turn is not None:
            call.turn.gate.sent(call.turn)

    def _enter_line(self, call: Waiting, use: TenantUse, limits: TenantLimits, now_s: float) -> None:
        """A line of a batch is sent at once: whoever sends it has asked for room, and it waits for nothing here.

        Lines leave one of their tenant's `max_running` to other calls, if there are several.
        """
        if use.running >= max(1, limits.max_running - 1):
            reached = ReachedLimit("max_running", limits.max_running, use.running)
            raise LimitError("As many calls of this tenant run as may.", code="too_many_waiting", reached=reached)
        self._busy.add(call.tenant)
        self._lines.send_line(call, now_s)
        if limits.has_rates:
            use.enter(call.tokens)

    def _is_paced(self, call: Waiting, now_s: float) -> bool:
        """Whether a call waits for its tenant's rates. It counts from now on, so later ones wait longer.

        Raises `LimitError` for a call that is no program's.
        """
        use, limits = self._uses[call.tenant], self._limits(call.tenant)
        if not call.passes:
            use.check_rate(limits, call.tokens, now_s, part=LINES_PART if call.call.is_line else 1.0)
            return False
        wait_s = use.wait_s(limits, call.tokens, now_s)
        if wait_s <= 0:
            return False
        use.enter(call.tokens)
        call.wait_for("rate", now_s)
        self._pace(call, now_s + wait_s)
        return True

    def _pace(self, call: Waiting, until_s: float) -> None:
        self._paced[call] = until_s
        self._at(until_s, partial(self._paced_until, call, until_s))

    def _paced_until(self, call: Waiting, until_s: float, now_s: float) -> None:
        if self._paced.get(call) == until_s:  # otherwise the call is gone, or the limits have changed
            del self._paced[call]
            self.sessions.arrive(call, now_s)  # it passes
            self._freed(call, now_s)

    def spend(self, tenant: str, now_s: float) -> None:
        """A request was refused before it became a call: it counts for its tenant's rate of calls."""
        self._uses[tenant].spend(self._limits(tenant), now_s)

    def left(self, call: Waiting, used_tokens: int | None, now_s: float) -> None:
        """A sent call and its booking have ended. `used_tokens`, if known, replaces the predicted tokens."""
        assert call.booking is not None
        self._uses[call.tenant].running -= 1
        if not call.call.is_line:
            self._lines.room.left(call.booking.placement.engine_id, call.tenant)
            self.shares.correct(call.tenant, 0 if used_tokens is None else used_tokens - call.tokens)
        if self.queue.held:
            self.queue.place_held(call.tenant, now_s)
        turn, call.turn = call.turn, None
        if turn is not None:
            gate = turn.gate
            gate.ended(turn, None if used_tokens is None else max(0, used_tokens - call.call.prompt_tokens), now_s)
            if gate.held.turns or now_s >= gate.worth.due_s:
                self.sessions.release(gate, now_s)

    def gone(self, call: Waiting, now_s: float) -> None:
        """The client of a call has gone before the engine got the call."""
        if self._paced.pop(call, None) is not None:
            self._uses[call.tenant].give_back(call.tokens)
            return
        if call.call.is_line:
            self._lines.unsend_line(call, now_s)
            self.queue.place_held(call.tenant, now_s)
        elif call.is_sent:
            self.queue.unsent(call, now_s)
        elif call.error is None and not call.is_held:
            self.queue.leave(call, now_s)
        self.sessions.gone(call, now_s)

    def leave(self, call: Waiting, now_s: float) -> LimitError:
        """Take a waiting call out, but keep its place for a retry. Returns the 429 for its client."""
        position, left_s = self.outlook(call, now_s)
        expected_s = max(1.0, left_s)
        again_s = min(expected_s, MOST_RETRY_AFTER_S)
        self._places.keep(call, now_s + again_s)
        is_held, where = call.is_held, f"at place {position} of this tenant's, for about {expected_s:.0f} s more"
        self.gone(call, now_s)
        if is_held:
            text = f"The session waits until its context fits into the engines' caches, {where}."
            return SessionWaitingError(f"{text} {KEPT}", position=position, retry_after_s=again_s)
        return LimitError(f"The call waits for an engine, {where}. {KEPT}", code="waiting", retry_after_s=again_s)

    def refine(self, waiting: Waiting, call: Call, now_s: float) -> None:
        """The objectives of a call have changed, before it enters or while it waits."""
        waiting.call = call
        has_entered = waiting.tell is not None
        if has_entered and not (waiting.is_sent or waiting.error or waiting.is_held or waiting in self._paced):
            self.queue.refine(waiting, now_s)

    def limits_changed(self, now_s: float) -> None:
        """Tenants may have other limits: more calls may run, and those that wait for rates wait anew."""
        paced, self._paced = self._paced, {}
        for call in paced:
            self._uses[call.tenant].give_back(call.tokens)
        for tenant in {call.tenant for call in paced}:
            self._uses[tenant].fit(self._limits(tenant), now_s)
        for call in paced:
            use, limits = self._uses[call.tenant], self._limits(call.tenant)
            wait_s = use.wait_s(limits, call.tokens, now_s)
            use.enter(call.tokens)
            self._pace(call, now_s + max(0.0, wait_s))
        for tenant in list(self.busy()):
            self.queue.place_held(tenant, now_s)

    def _freed(self, call: Waiting, now_s: float) -> None:
        """A call's session is no longer held: place the call."""
        self._busy.add(call.tenant)
        try:
            if self._uses[call.tenant].running < self._limits(call.tenant).max_running:
                self._lines.place(call, now_s)
            if not call.is_sent:
                self.queue.wait(call, now_s)
        except PlaitError as error:
            self.queue.give_up(call, error, now_s)
            return
        if call.is_sent:
            self._sent(call, now_s)

    def _sent(self, call: Waiting, _now_s: float) -> None:
        """A call that has waited may be sent."""
        if call.turn is not None:
            call.turn.gate.sent(call.turn)
        if call.tell is not None:
            call.tell()

    def _given_up(self, call: Waiting, now_s: float) -> None:
        """A call that has waited got an error."""
        self.sessions.gone(call, now_s)
        if call.tell is not None:
            call.tell()


class KeptPlaces:
    """The places in the queue of calls whose clients were told to retry."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], tuple[int, float]] = {}  # number and time of expiry, by the call

    def keep(self, call: Waiting, until_s: float) -> None:
        """Keep the call's place until `GRACE_S` after this time."""
        if len(self.kept) >= MOST_KEPT:
            del self.kept[next(iter(self.kept))]
        self.kept[_same(call)] = call.number, until_s + GRACE_S

    def has(self, call: Waiting) -> bool:
        return bool(self.kept) and _same(call) in self.kept

    def take(self, call: Waiting, now_s: float) -> int | None:
        """The number of the call's first arrival; None if no place is kept for it, or no longer."""
        number, until_s = self.kept.pop(_same(call), (None, 0.0))
        return number if now_s <= until_s else None


def _same(call: Waiting) -> tuple[object, ...]:
    """The key by which a retry is recognised."""
    asked = call.call
    last = asked.block_hashes[-1] if len(asked.block_hashes) else None
    return call.tenant, asked.model, asked.prompt_tokens, asked.output_limit, asked.prompt_hash, last


class SessionGates:
    """The session gates, by base model. `on_free` is called with each held call that passes.

    `weight` returns a tenant's weight. Prompts of fewer than `chat_tokens` that extend no other are chat; infinite: no
    call is held. `caches` finds the engines' caches of a model, and `part` returns this gateway's part of them.
    """

    def __init__(
        self,
        router: Router,
        at: At,
        weight: Callable[[str], float],
        on_free: Callable[[Waiting, float], None],
        chat_tokens: float = CHAT_TOKENS,
        *,
        part: Callable[[str], float],
    ) -> None:
        self.gates: dict[str, SessionGate] = {}
        self.part = part
        self.caches: Callable[[Router, str], Caches | None] = self._caches
        self._router = router
        self._at = at
        self._weight = weight
        self._on_free = on_free
        self._chat_tokens = chat_tokens
        self._held: dict[Turn, Waiting] = {}
        self._closed: set[SessionGate] = set()  # the gates that were last logged as closed
        self._is_looking = False

    def _caches(self, router: Router, model: str) -> Caches | None:
        return caches(router, model, self.part(model))

    def arrive(self, call: Waiting, now_s: float) -> bool:
        """A call has arrived. Returns whether it passes. A held call passes when `on_free` is called with it."""
        if self._chat_tokens == inf:
            return True
        model = self._router.models.bases.get(call.call.model, call.call.model)
        gate = self.gates.get(model) or self._new_gate(model)
        if gate is None:
            return True
        turn = call.turn = gate.arrive(call, now_s)
        if turn.is_held:
            self._held[turn] = call
        if gate.held.turns:
            freed = self._released(gate, now_s)
            if turn in freed:
                freed.remove(turn)
                del self._held[turn]
            self._free(freed, now_s)
            self._look_soon(now_s)
        if gate.worth.is_closed is not (gate in self._closed):
            self._tell(gate)
        if turn.is_held:
            call.wait_for("session", now_s)
        return not turn.is_held

    def release(self, gate: SessionGate, now_s: float) -> None:
        """Let the calls pass that a gate no longer holds."""
        self._free(self._released(gate, now_s), now_s)

    def gone(self, call: Waiting, now_s: float) -> None:
        """A call will not be answered, whether it was held or not."""
        turn, call.turn = call.turn, None
        if turn is not None:
            gate = turn.gate
            self._held.pop(turn, None)
            gate.gone(turn, now_s)
            if gate.held.turns or now_s >= gate.worth.due_s:
                self.release(gate, now_s)

    # What is held.

    def waiting(self, call: Waiting) -> int:
        """How many calls of the same tenant and model are held."""
        return 0 if call.turn is None else len(call.turn.gate.held.of(call.tenant))

    def has_begun(self, call: Waiting) -> bool:
        """Whether a call extends an answered context: a refusal would lose the session's work so far."""
        return call.turn is not None and call.turn.context is not None and call.turn.context.ended_s is not None

    def outlook(self, call: Waiting) -> tuple[int, float]:
        """(a held call's place among its tenant's, predicted seconds until it passes)."""
        assert call.turn is not None
        return call.turn.gate.held.outlook(call.turn)

    # The gates.

    def _new_gate(self, model: str) -> SessionGate | None:
        """Make the gate of a base model; None if no engine serves the model."""
        if not self._router.models.able(model):
            return None
        look = partial(self.caches, self._router, model)
        gate = self.gates[model] = SessionGate(self._router.block_tokens, look, self._weight, self._chat_tokens)
        return gate

    def _released(self, gate: SessionGate, now_s: float) -> list[Turn]:
        released = gate.release(now_s)
        if gate.worth.is_closed is not (gate in self._closed):
            self._tell(gate)
        return released

    def _tell(self, gate: SessionGate) -> None:
        """Log that the gate has closed or opened, and why."""
        worth = gate.worth
        (self._closed.add if worth.is_closed else self._closed.remove)(gate)
        log.info(
            "sessions are held" if worth.is_closed else "sessions are held no more",
            model=next(model for model, one in self.gates.items() if one is gate),
            value=round(worth.value, 2), load=round(worth.load, 2), live=len(gate.live),
            live_tokens=gate.tokens, kv_tokens=0 if worth.caches is None else worth.caches.kv_tokens,
        )  # fmt: skip

    def _free(self, turns: Iterable[Turn], now_s: float) -> None:
        for turn in turns:
            self._on_free(self._held.pop(turn), now_s)

    def _look_soon(self, now_s: float) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._at(now_s + LOOK_S, self._look)

    def _look(self, now_s: float) -> None:
        self._is_looking = False
        for gate in self.gates.values():
            self.release(gate, now_s)
        if self._held:
            self._look_soon(now_s)


def caches(router: Router, model: str, part: float = 1.0) -> Caches | None:
    """A part of the engines that take calls for a model, and of their KV in all tiers.

    None if the size of some engine's cache is not known.
    """
    views = router.models.able(model)
    sizes = [router.engines[view.engine_id].cache.likely_tokens for view in views]
    if not views or not all(sizes):
        return None
    slowness = sum(view.slowness for view in views) / len(views)
    device_tokens = sum(filter(None, sizes))
    kv_tokens = device_tokens + sum(view.tiers.total_tokens for view in views)
    share = device_tokens / kv_tokens
    return Caches(part * len(views), int(part * kv_tokens), views[0].cost_model, slowness, share)
