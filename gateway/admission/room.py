"""Whether an engine is sent one more call, or the call waits in the gateway.

An engine is kept busy by what it was sent: about a second of prompts. More would wait in the engine, where the gateway
can neither change its order nor move it. While several tenants use a model it is less, since one of them may send much:
then the others' calls pass in the gateway.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import inf
from typing import Final

from plait.policy.admission.fair_shares import ActiveTenants, FairShares
from plait.policy.costs.engine_view import EngineView, sent_calls

AHEAD_S: Final = 1.0
"""Measured with `python -m benchmarks full_fleet`: with half a second, the TTFT is up to 16 % longer."""

SHARED_AHEAD_S: Final = 0.25
"""The same while several tenants are active. One that comes waits for what the others have in the engine."""

SLOTS_A_RESERVED: Final = 64
"""One slot in so many is kept from tenants that have more than their share of an engine's slots, while several are
active. So a tenant with few calls need not wait until an answer ends.
"""


class Room:
    """The room of the engines. An engine is sent prompts of `ahead_s` (infinite: no call waits for its engine).

    `active` has the tenants that have sent calls lately.
    """

    def __init__(self, ahead_s: float, shares: FairShares) -> None:
        self._ahead_s = ahead_s
        self.active = ActiveTenants(shares.weights)
        self._sent: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def sent(self, engine_id: str, tenant: str) -> None:
        """An engine was sent a call. `left` follows."""
        self._sent[engine_id][tenant] += 1

    def left(self, engine_id: str, tenant: str) -> None:
        """A call that an engine was sent has ended."""
        sent = self._sent[engine_id]
        sent[tenant] -= 1
        if not sent[tenant]:
            del sent[tenant]
        if not sent:
            del self._sent[engine_id]

    def has(self, view: EngineView, tenant: str | None, now_s: float) -> bool:
        """Whether the engine is sent a further call of the tenant (None: of a tenant that has none there).

        That is so if a slot is free, and what the engine computes ends soon.
        """
        if self._ahead_s == inf:
            return True
        is_shared = self.active.are_several(now_s)
        if view.slots and not self._has_slot(view, tenant, now_s, is_shared=is_shared):
            return False
        queue = view.queue
        if queue.expires_s <= now_s:
            queue.expire(now_s)
        if not queue.sent:
            return True
        bound_s = self._bound_s(view, is_shared=is_shared)
        return backlog_s(view, now_s) < bound_s and not (is_shared and queue.sent * view.first_bytes.gap_s >= bound_s)

    def due_s(self, view: EngineView, tenant: str, now_s: float) -> float:
        """When there will be room as time passes, if nothing else happens; infinite if there will be none."""
        is_shared = self.active.are_several(now_s)
        if view.slots and not self._has_slot(view, tenant, now_s, is_shared=is_shared):
            return inf
        over_s = backlog_s(view, now_s) - (bound_s := self._bound_s(view, is_shared=is_shared))
        queue = view.queue
        if is_shared and queue.sent * view.first_bytes.gap_s >= bound_s:
            return queue.expires_s
        left_s = view.slowness * (queue.most_progress_s - queue.progress_s(now_s))
        return min(now_s + max(0.0, over_s) / view.slowness if over_s < left_s else inf, queue.expires_s)

    def _bound_s(self, view: EngineView, *, is_shared: bool) -> float:
        """How much the engine is sent, by this gateway and others, before this one waits.

        It counts its own part: a tenant alone may send as much through each gateway. Of several tenants' calls each
        gateway sends its share. Otherwise whoever fills an engine would be the first to learn of room, and keep all.
        """
        bound_s = min(self._ahead_s, SHARED_AHEAD_S) if is_shared else self._ahead_s
        own = view.queue.own_share * (view.gateways if is_shared else 1)
        return bound_s if own >= 1 else bound_s / own if own > 0 else inf

    def _has_slot(self, view: EngineView, tenant: str | None, now_s: float, *, is_shared: bool) -> bool:
        free = _free_slots(view)
        if tenant is None or not is_shared or free > view.slots // SLOTS_A_RESERVED:
            return free > 0
        sent = self._sent[view.engine_id][tenant] if view.engine_id in self._sent else 0
        return free > 0 and sent < view.slots * self.active.share(tenant, now_s)


def _free_slots(view: EngineView) -> int:
    """The slots that this gateway may fill. Those that others have filled are not free, but each may fill its share.

    Without that, whoever has calls there would be the first to learn of each slot that gets free, and keep all of them.
    """
    sent = sent_calls(view)
    free = view.slots - sent - view.reported
    return free if free > 0 or not view.reported else view.slots // view.gateways - sent


def backlog_s(view: EngineView, now_s: float) -> float:
    """Seconds until the prompts that the engine was sent are computed, at the pace that was measured."""
    queue = view.queue
    queue.expire(now_s)
    if not queue.sent:
        return 0.0
    return view.slowness * (view.drain_s(queue.sent_tokens) + queue.sent_attention_s - queue.progress_s(now_s))
