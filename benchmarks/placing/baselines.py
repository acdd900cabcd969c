"""Placement policies of other gateways, from their published descriptions, to compare with."""

from __future__ import annotations

from typing import Final

from plait.lab.simulation.rivals import cached_blocks, in_turn, place
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation
from plait.policy.placement.policies import Policy
from plait.policy.types import Call, Placement

STICKY_SHARE: Final = 0.8
"""An engine with so much of the prompt cached is sticky for it (llm-d)."""
STICKY_QUEUE_S: Final = 18.0
"""Sticky engines whose queue exceeds the others' by more than this are given up (llm-d)."""


def lmetric(call: Call, situation: Situation) -> Placement:
    """LMetric: the least product of prefill tokens (queued, and missed of this call) and calls in the batch."""
    held = cached_blocks(call, situation)

    def metric(engine: EngineView) -> int:
        missed_tokens = call.prompt_tokens - held[engine] * call.block_tokens
        return (engine.queue.tokens + missed_tokens) * (engine.outstanding + 1)

    return place(call, min(in_turn(situation), key=metric), held)


def sticky(call: Call, situation: Situation) -> Placement:
    """llm-d's: of the engines that have the prefix the one with the least uncached tokens in flight; of all, if none
    has it or those are overloaded.
    """
    held = cached_blocks(call, situation)
    stuck = [e for e in in_turn(situation) if held[e] * call.block_tokens >= STICKY_SHARE * call.prompt_tokens]
    others = [engine for engine in situation.engines if engine not in stuck]
    if not stuck or (others and min(map(_queue_s, stuck)) - min(map(_queue_s, others)) > STICKY_QUEUE_S):
        stuck = in_turn(situation)
    return place(call, min(stuck, key=lambda engine: (engine.queue.tokens, engine.outstanding)), held)


def _queue_s(engine: EngineView) -> float:
    return engine.drain_s(engine.queue.tokens)


LMETRIC: Final = Policy("lmetric", "LMetric", lmetric)
STICKY: Final = Policy("sticky", "llm-d (sticky)", sticky)
