"""A call that continues another is placed on the same engine, under every policy: its prompt is cached there."""

from __future__ import annotations

from collections.abc import Mapping

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.policies import Situation, cached_blocks
from plait.policy.placement.reservation import Reservation
from plait.policy.types import Call, Placement, PlacementReason


def continue_on(engine: EngineView, call: Call, situation: Situation) -> Placement:
    """Place `call` on `engine`, which is eligible. If the call's task group has places, the call takes one."""
    cached_tokens = cached_blocks(call, situation, engine) * call.block_tokens
    places = None
    if call.group is not None and situation.reservation is not None:
        places = places_left(situation.reservation, call.group.calls - 1, engine.engine_id)
    missed_tokens = call.prompt_tokens - cached_tokens
    return Placement(engine.engine_id, PlacementReason.CONTINUE, cached_tokens, missed_tokens, places=places)


def places_left(reservation: Reservation, others: int, engine_id: str) -> Mapping[str, int]:
    """A group's places after one of its calls was placed on an engine.

    The group keeps at most one place for each of its `others` that does not run yet. It gives up surplus places on
    that engine first, then on the engine with the most places.
    """
    left = dict(reservation.places)
    for _ in range(sum(left.values()) - max(0, others - reservation.running)):
        given_up = engine_id if left.get(engine_id) else max(left, key=lambda one: left[one])
        left[given_up] -= 1
    return {engine: places for engine, places in left.items() if places}
