"""Whether an engine is sent one more call, or the call waits in the gateway.

An engine is kept busy by what it was sent: about a second of prompts. More would wait in the engine, where the gateway
can neither change its order nor move it.
"""

from __future__ import annotations

from math import inf

from plait.policy.placement.engine_view import EngineView, sent_calls

AHEAD_S = 1.0
"""Measured with `python -m benchmarks full_fleet`: with half a second, the TTFT is up to 16 % longer."""


def has_room(view: EngineView, ahead_s: float, now_s: float) -> bool:
    """Whether the engine is sent a further call: one of its slots is free, and what it computes ends soon."""
    if ahead_s == inf:
        return True
    if view.slots and sent_calls(view) >= view.slots:
        return False
    return not view.queue.sent or backlog_s(view, now_s) < ahead_s


def room_s(view: EngineView, ahead_s: float, now_s: float) -> float:
    """When there will be room as time passes, if nothing else happens; infinite if there will be none."""
    queue, over_s = view.queue, backlog_s(view, now_s) - ahead_s
    if view.slots and sent_calls(view) >= view.slots:
        return inf
    left_s = view.slowness * (queue.most_progress_s - queue.progress_s(now_s))
    return min(now_s + max(0.0, over_s) / view.slowness if over_s < left_s else inf, queue.expires_s)


def backlog_s(view: EngineView, now_s: float) -> float:
    """Seconds until the prompts that the engine was sent are computed, at the pace that was measured."""
    queue = view.queue
    queue.expire(now_s)
    if not queue.sent:
        return 0.0
    return view.slowness * (view.drain_s(queue.sent_tokens) + queue.sent_attention_s - queue.progress_s(now_s))
