"""Placement policies of other gateways, from their published descriptions, to compare with."""

from __future__ import annotations

from typing import Final

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import Situation, cached_blocks, placed
from plait.policy.types import Call, Placement, PlacementReason

STICKY_SHARE: Final = 0.8
"""An engine with so much of the prompt cached is sticky for it (llm-d)."""
STICKY_QUEUE_S: Final = 18.0
"""Sticky engines whose queue exceeds the others' by more than this are given up (llm-d)."""


def lmetric(call: Call, situation: Situation) -> Placement:
    """LMetric: the least product of prefill tokens (queued, and missed of this call) and calls in the batch."""
    held = {engine: cached_blocks(call, situation, engine) for engine in situation.engines}

    def metric(engine: EngineView) -> int:
        missed_tokens = call.prompt_tokens - held[engine] * call.block_tokens
        return (engine.queue.tokens + missed_tokens) * (engine.outstanding + 1)

    return place(call, min(in_turn(situation), key=metric), held)


def sticky(call: Call, situation: Situation) -> Placement:
    """llm-d's: of the engines that have the prefix the one with the least uncached tokens in flight; of all, if none
    has it or those are overloaded.
    """
    held = {engine: cached_blocks(call, situation, engine) for engine in situation.engines}
    stuck = [e for e in in_turn(situation) if held[e] * call.block_tokens >= STICKY_SHARE * call.prompt_tokens]
    others = [engine for engine in situation.engines if engine not in stuck]
    if not stuck or (others and min(map(_queue_s, stuck)) - min(map(_queue_s, others)) > STICKY_QUEUE_S):
        stuck = in_turn(situation)
    return place(call, min(stuck, key=lambda engine: (engine.queue.tokens, engine.outstanding)), held)


def _queue_s(engine: EngineView) -> float:
    return engine.drain_s(engine.queue.tokens)


def in_turn(situation: Situation) -> list[EngineView]:
    """The engines in an order that changes from call to call, so that ties are not always won by the first."""
    first = situation.turn % len(situation.engines)
    return [*situation.engines[first:], *situation.engines[:first]]


def place(call: Call, engine: EngineView, held: dict[EngineView, int]) -> Placement:
    """The placement of the call on an engine; `held` has the blocks of its prompt that each engine has."""
    exploits = 2 * held[engine] * call.block_tokens > call.prompt_tokens
    return placed(call, engine, PlacementReason.EXPLOIT if exploits else PlacementReason.EXPLORE, held[engine])
