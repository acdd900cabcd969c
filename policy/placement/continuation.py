"""A call that continues another is placed on the same engine, under every policy: its prompt is cached there."""

from __future__ import annotations

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import Situation, cached_blocks, placed
from plait.policy.types import Call, Placement, PlacementReason


def continue_on(engine: EngineView, call: Call, situation: Situation) -> Placement:
    """Place `call` on `engine`, which is eligible."""
    return placed(call, engine, PlacementReason.CONTINUE, cached_blocks(call, situation, engine))
