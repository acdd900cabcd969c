"""The policy `plait` with one part of its sum left out."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from plait.policy.placement.delay import delay_cost
from plait.policy.placement.situation import Policy, Situation, cached_blocks, placed
from plait.policy.types import Call, DelayCost, Placement, PlacementReason

TERMS: Final = tuple(field.name for field in fields(DelayCost))
"""The parts of the sum."""


def without(term: str) -> Policy:
    """The engine with the least delay, where `term` counts nothing. Ties: in turn."""

    def place(call: Call, situation: Situation) -> Placement:
        output_tokens = situation.traffic.expected_output_tokens(call.output_limit)
        held = [cached_blocks(call, situation, engine) for engine in situation.engines]
        costs = [
            delay_cost(call, engine, blocks, output_tokens, situation.now_s)
            for engine, blocks in zip(situation.engines, held, strict=True)
        ]
        sums = [sum(getattr(cost, other) for other in TERMS if other != term) for cost in costs]
        best = [number for number, seconds in enumerate(sums) if seconds == min(sums)]
        chosen = best[situation.turn % len(best)]
        exploits = 2 * held[chosen] * call.block_tokens > call.prompt_tokens
        reason = PlacementReason.EXPLOIT if exploits else PlacementReason.EXPLORE
        return placed(call, situation.engines[chosen], reason, held[chosen], costs[chosen])

    return place
