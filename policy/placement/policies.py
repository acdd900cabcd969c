"""The placement policies by their names in the configuration.

A policy chooses the engine of a call. A call that continues another is placed on the same engine, under every policy:
its prompt is cached there. See docs/placement.md.
"""

from __future__ import annotations

from plait.policy.placement.baselines import least_outstanding, round_robin
from plait.policy.placement.e2 import e2
from plait.policy.placement.least_delay import least_delay
from plait.policy.placement.situation import Policy, Situation, cached_blocks, placed
from plait.policy.types import Call, Placement, PlacementReason

POLICIES: dict[str, Policy] = {
    "plait": least_delay,
    "e2": e2,
    "round_robin": round_robin,
    "least_outstanding": least_outstanding,
}


def continued(engine_id: str, call: Call, situation: Situation) -> Placement | None:
    """The placement of `call` on this engine; None if that is not among those of the situation."""
    for engine in situation.engines:
        if engine.engine_id == engine_id:
            return placed(call, engine, PlacementReason.CONTINUE, cached_blocks(call, situation, engine))
    return None
