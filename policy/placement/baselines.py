"""The plain placement policies: in turn, and by the number of outstanding calls."""

from __future__ import annotations

from plait.policy.placement.situation import Situation, cached_blocks, placed
from plait.policy.types import Call, Placement, PlacementReason


def round_robin(call: Call, situation: Situation) -> Placement:
    """Each engine in turn."""
    engine = situation.engines[situation.turn % len(situation.engines)]
    return placed(call, engine, PlacementReason.ROUND_ROBIN, cached_blocks(call, situation, engine))


def least_outstanding(call: Call, situation: Situation) -> Placement:
    """The engine with the fewest outstanding calls; ties: in turn."""
    fewest = min(engine.outstanding for engine in situation.engines)
    idle = [engine for engine in situation.engines if engine.outstanding == fewest]
    engine = idle[situation.turn % len(idle)]
    return placed(call, engine, PlacementReason.LEAST_OUTSTANDING, cached_blocks(call, situation, engine))
