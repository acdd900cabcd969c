"""Whether an engine has room for a further call: a free slot, and little work that it serves before the call.

In: calls are placed, sent and end (`came`, `fill`, `left`). Out: why a call has to wait (`waits_for`), and when to ask
again (`due_s`).

A call counts the sent prompts of its own precedence. A call whose tenant is over its share counts all sent prompts. See
docs/design/admission.md.
"""

from __future__ import annotations

from collections import defaultdict
from math import inf
from typing import Final

from plait.gateway.admission.waits import WaitReason
from plait.policy.admission.arrivals import ArrivalRates
from plait.policy.admission.fair_shares import ActiveTenants, FairShares
from plait.policy.costs.engine_view import EngineView, sent_calls
from plait.policy.costs.prefill_queue import Precedence, PrefillQueue

AHEAD_S: Final = 0.5
"""An engine is sent at most this many seconds of prompts behind the one that it computes: more than an iteration, and
little that a later call of the same tenant would have to wait for.
"""

PROMISED_AHEAD_S: Final = 4.0
"""The same for prompts on time, which an engine with our scheduler serves in the order of their deadlines."""

SHARED_AHEAD_S: Final = 0.25
"""`AHEAD_S` while several tenants are active: a new call has to wait for what the others have in the engine."""

OWN_S: Final = 1.0
"""While several tenants are active, an engine is sent at most this many seconds of a tenant's prompts on time that are
due before a further one of the tenant, and `PROMISED_AHEAD_S` of them in all.
"""

SLOTS_A_RESERVED: Final = 64
"""While several tenants are active, at least one slot in this many is kept from tenants above their share of an
engine's slots. So a tenant with few calls need not wait until an answer ends.
"""

RESERVED_S: Final = 1.0
"""The slots for the other tenants' calls of this many seconds are kept. Equally long answers end in waves, and
no slot is free between waves. A call that takes a kept slot ends at a time of its own.
"""


class Room:
    """The room of all engines. `ahead_s` replaces `AHEAD_S`; infinite: no call waits for its engine.

    `active` are the tenants with recent calls. `sent` counts the sent calls that have not ended, by engine and tenant.
    """

    def __init__(self, ahead_s: float, shares: FairShares) -> None:
        self._ahead_s = ahead_s
        self._shares = shares
        self.active = ActiveTenants(shares.weights)
        self.sent: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._arrivals: defaultdict[str, ArrivalRates] = defaultdict(ArrivalRates)  # by engine
        self._wanted: dict[str, tuple[float, dict[str, float]]] = {}  # by engine: (computed at, slots by tenant)

    def came(self, engine_id: str, tenant: str, now_s: float) -> None:
        """A call of the tenant was placed on an engine."""
        self._arrivals[engine_id].came(tenant, now_s)

    def fill(self, engine_id: str, tenant: str, tokens: int, now_s: float) -> None:
        """A call of the tenant was sent to an engine."""
        self.active.sent(tenant, tokens, now_s)
        self.sent[engine_id, tenant] += 1

    def left(self, engine_id: str, tenant: str) -> None:
        """A sent call has ended."""
        key = engine_id, tenant
        sent = self.sent[key] - 1
        if sent:
            self.sent[key] = sent
        else:
            del self.sent[key]

    def is_over(self, tenant: str, now_s: float) -> bool:
        """Whether a tenant got more than its share lately, and has further calls that wait."""
        active = self.active
        return len(active.latest) > 1 and self._shares.is_waiting(tenant) and active.is_over(tenant, now_s)

    def waits_for(
        self,
        view: EngineView,
        tenant: str,
        now_s: float,
        precedence: Precedence = Precedence.REST,
        *,
        due_s: float = -inf,
    ) -> WaitReason | None:
        """What a further prompt of the tenant waits for; None if the engine has room for it.

        `precedence` is the prompt's if it overtakes the line, or `REST` if its turn has come. `due_s` is the deadline
        of a prompt on time; -inf: it is not on time.
        """
        if self._ahead_s == inf:
            return None
        is_shared = self.active.are_several(now_s)
        no_slot = self._no_slot(view, tenant, now_s, is_shared=is_shared)
        if no_slot is not None:
            return no_slot
        queue = view.queue
        if queue.expires_s <= now_s:
            queue.expire(now_s)
        if not queue.sent:
            return None
        queue.find_late(now_s)
        is_over = is_shared and self.is_over(tenant, now_s)
        if is_over and not _may_pass_others(queue, tenant, precedence):
            return "tenant_share"
        before_s = self._before_s(view, precedence, now_s, due_s, is_shared=is_shared, is_over=is_over)
        bound_s = self._bound_s(view, precedence, is_shared=is_shared)
        if before_s < bound_s and not (is_shared and self._has_enough(view, tenant, due_s)):
            return None
        others_s = self._before_s(view, precedence, now_s, due_s, is_shared=is_shared, is_over=False)
        return "tenant_share" if is_over and others_s < bound_s else "prompts"

    def has_last(self, view: EngineView, tenant: str | None, now_s: float) -> bool:
        """Whether the engine has room for a prompt that it serves last; `tenant` None: one without calls there."""
        if self._ahead_s == inf:
            return True
        is_shared = self.active.are_several(now_s)
        if self._no_slot(view, tenant, now_s, is_shared=is_shared) is not None:
            return False
        before_s = _all_s(view, now_s, is_shared=is_shared)
        return not view.queue.sent or before_s < self._bound_s(view, Precedence.REST, is_shared=is_shared)

    def due_s(self, view: EngineView, tenant: str, now_s: float, *, due_s: float = -inf) -> float:
        """When there may be room without a further event; infinite: not without one."""
        is_shared, queue = self.active.are_several(now_s), view.queue
        queue.expire(now_s)
        queue.find_late(now_s)
        if self._no_slot(view, tenant, now_s, is_shared=is_shared) is not None:
            kept_since_s, _ = self._wanted.get(view.engine_id, (inf, {}))
            return kept_since_s + RESERVED_S if view.slots and _free_slots(view) > 0 else inf
        is_over = is_shared and self.is_over(tenant, now_s)
        bound_s = self._bound_s(view, Precedence.REST, is_shared=is_shared)
        over_s = self._before_s(view, Precedence.REST, now_s, due_s, is_shared=is_shared, is_over=is_over) - bound_s
        has_enough = is_shared and self._has_enough(view, tenant, due_s)
        if not queue.sent or (over_s < 0 and not has_enough):
            return now_s
        events_s = min(queue.expires_s, queue.late_s)
        if not is_shared or has_enough:
            return events_s  # the prompts behind the computed one do not get fewer while it is computed
        share = 1.0 if is_over else _rest_share(view)
        if share * queue.sent * view.first_bytes.gap_s >= bound_s:
            return events_s
        left_s = view.slowness * share * (queue.most_progress_s - queue.progress_s(now_s))
        return min(now_s + over_s / (view.slowness * share) if over_s < left_s else inf, events_s)

    def _has_enough(self, view: EngineView, tenant: str, due_s: float) -> bool:
        """Whether the engine has enough of a tenant's prompts on time, for a further one with the deadline `due_s`.

        Prompts of the rest do not count prompts on time. Without this bound, an engine would get a whole flood of calls
        whose deadlines can be met, and calls without a deadline would wait in the engine for all of it. Each gateway
        knows its own tenants' prompts only, and sends its part.
        """
        if due_s == -inf:
            return False
        before_s = view.gateways * _prompts_s(view, view.queue.own_on_time(tenant, due_s))
        all_s = view.gateways * _prompts_s(view, view.queue.own_on_time(tenant))
        return before_s >= OWN_S or all_s >= max(self._ahead_s, PROMISED_AHEAD_S)

    def _before_s(
        self,
        view: EngineView,
        precedence: Precedence,
        now_s: float,
        due_s: float,
        *,
        is_shared: bool,
        is_over: bool,
    ) -> float:
        """Seconds of the sent prompts that the engine serves before a further one of this precedence."""
        queue = view.queue
        if is_over and precedence is Precedence.REST:
            return _all_s(view, now_s, is_shared=True)
        if precedence is Precedence.ON_TIME and not is_over:
            return _prompts_s(view, queue.on_time_before(due_s))
        if precedence is Precedence.SMALL:
            return _prompts_s(view, queue.tokens_of[precedence])
        if is_shared and not is_over:
            return _rest_share(view) * _all_s(view, now_s, is_shared=True)
        tokens, attention_s = queue.behind()
        return view.slowness * (view.drain_s(tokens) + attention_s) if tokens else 0.0

    def _bound_s(self, view: EngineView, precedence: Precedence, *, is_shared: bool) -> float:
        """The most seconds of sent prompts, those of other gateways included, with which this one sends another.

        Each gateway bounds its own part only. A tenant alone may have the whole bound through each gateway. Of several
        tenants' calls, each gateway sends its share: otherwise the gateway that fills an engine would be the first to
        learn of free room, and keep all of it.
        """
        bound_s = self._ahead_s
        if is_shared:
            bound_s = min(bound_s, SHARED_AHEAD_S)
        elif precedence is Precedence.ON_TIME:
            bound_s = max(bound_s, PROMISED_AHEAD_S)
        own = view.queue.own_share * (view.gateways if is_shared else 1)
        return bound_s if own >= 1 else bound_s / own if own > 0 else inf

    def _no_slot(self, view: EngineView, tenant: str | None, now_s: float, *, is_shared: bool) -> WaitReason | None:
        """Why the tenant may not take a slot of the engine; None: it may."""
        if not view.slots:
            return None
        free = _free_slots(view)
        if free <= 0:
            return "slot"
        if tenant is None or not is_shared:
            return None
        if self.sent.get((view.engine_id, tenant), 0) < view.slots * self.active.share(tenant, now_s):
            return None
        kept = max(view.slots // SLOTS_A_RESERVED, self._wanted_by_others(view, tenant, now_s))
        return None if free > kept else "tenant_share"

    def _wanted_by_others(self, view: EngineView, tenant: str, now_s: float) -> float:
        """The slots that other tenants need for their calls of `RESERVED_S`; computed once in this time."""
        since_s, wanted = self._wanted.get(view.engine_id, (-inf, {}))
        if now_s - since_s >= RESERVED_S:
            wanted = self._wants(view, now_s)
            self._wanted[view.engine_id] = now_s, wanted
        return sum(wanted.values()) - wanted.get(tenant, 0.0)

    def _wants(self, view: EngineView, now_s: float) -> dict[str, float]:
        """By tenant, the slots for its calls of `RESERVED_S`, at most up to its share of the engine."""
        rates = self._arrivals[view.engine_id].per_s(now_s)
        left = {
            tenant: view.slots * self.active.share(tenant, now_s) - self.sent.get((view.engine_id, tenant), 0)
            for tenant in rates
        }
        return {tenant: max(0.0, min(RESERVED_S * rate, left[tenant])) for tenant, rate in rates.items()}


def _prompts_s(view: EngineView, tokens: int) -> float:
    """Seconds in which the engine computes `tokens` of prompts, without their attention."""
    return view.slowness * view.drain_s(tokens) if tokens else 0.0


def _free_slots(view: EngineView) -> int:
    """The slots that this gateway may fill: the free ones, or if none is, up to its equal share of all slots.

    Otherwise the gateways with calls there would be the first to learn of each freed slot, and keep all of them.
    """
    sent = sent_calls(view)
    free = view.slots - sent - view.reported
    return free if free > 0 or not view.reported else view.slots // view.gateways - sent


def backlog_s(view: EngineView, now_s: float) -> float:
    """Seconds until the sent prompts are computed, at the engine's measured pace."""
    queue = view.queue
    queue.expire(now_s)
    if not queue.sent:
        return 0.0
    return view.slowness * (view.drain_s(queue.sent_tokens) + queue.sent_attention_s - queue.progress_s(now_s))


def _may_pass_others(queue: PrefillQueue, tenant: str, precedence: Precedence) -> bool:
    """Whether a prompt of a tenant over its share may be sent: small ones not, one on time before its own ones only."""
    if precedence is Precedence.ON_TIME:
        return queue.tenants.keys() == {tenant}
    return precedence is Precedence.REST


def _all_s(view: EngineView, now_s: float, *, is_shared: bool) -> float:
    """Seconds until all sent prompts are computed. Beside other tenants, at least by the rate of first bytes, because
    only this rate shows that an engine's KV cache is full.
    """
    found_s = backlog_s(view, now_s)
    return max(found_s, view.queue.sent * view.first_bytes.gap_s) if is_shared else found_s


def _rest_share(view: EngineView) -> float:
    """The part of the sent tokens with the precedence `REST`."""
    queue = view.queue
    return queue.tokens_of[Precedence.REST] / queue.sent_tokens if queue.sent_tokens else 0.0
