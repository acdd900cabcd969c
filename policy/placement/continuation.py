"""A call that continues another is placed on the same engine, under every policy: its prompt is cached there."""

from __future__ import annotations

from plait.policy.placement.situation import Situation, cached_blocks, placed
from plait.policy.types import Call, Placement, PlacementReason


def continued(engine_id: str, call: Call, situation: Situation) -> Placement | None:
    """The placement of `call` on this engine; None if that is not among those of the situation."""
    for engine in situation.engines:
        if engine.engine_id == engine_id:
            return placed(call, engine, PlacementReason.CONTINUE, cached_blocks(call, situation, engine))
    return None
