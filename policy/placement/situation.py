"""What a placement policy is given, and what it returns.

Selection has no side effects. A policy reads engine views and returns a `Placement`. The router books it. `engines`
holds only eligible engines: healthy, not draining, serving the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.traffic import NO_TRAFFIC, NOTHING_COMES, Coming, Traffic
from plait.policy.prefix.prefix_tree import Segment
from plait.policy.types import Call, DelayCost, LoadCost, Placement, PlacementReason


class Passed(NamedTuple):
    """The calls that wait in the gateway for engines, and that a new call goes before, because its tenant may.

    `shares` is, by engine, their part of what waits for it. `calls` is how many they are for an engine on average. It
    counts for every engine alike: the new call delays them wherever it goes.
    """

    shares: Mapping[str, float]
    calls: float


NOTHING_PASSED: Final = Passed({}, 0.0)


class Situation(NamedTuple):
    """A policy's input at the time `now_s`.

    `path` is the call's matched path. `engines` are the eligible engines in a fixed order. `turn` is the number of
    calls placed before this one. `traffic` is that of calls like this one. `siblings` counts the other calls of its
    task group that still have to be placed. `passed` are the calls that wait in the gateway behind this one.
    `coming` are the calls of its model that each engine has to expect.
    """

    path: Sequence[Segment]
    engines: Sequence[EngineView]
    turn: int
    now_s: float = 0.0
    traffic: Traffic = NO_TRAFFIC
    siblings: int = 0
    passed: Passed = NOTHING_PASSED
    coming: Coming = NOTHING_COMES


Policy = Callable[[Call, Situation], Placement]


def cached_blocks(call: Call, situation: Situation, engine: EngineView) -> int:
    """Blocks of the prompt that the engine is expected to have cached, less any block with the last prompt token."""
    return min(call.cacheable_blocks, engine.residency.held_blocks(situation.path))


def placed(
    call: Call,
    engine: EngineView,
    reason: PlacementReason,
    held_blocks: int,
    cost: LoadCost | DelayCost | None = None,
    *,
    is_at_risk: bool = False,
) -> Placement:
    """The placement of `call` on `engine`, which has `held_blocks` of its prompt."""
    cached_tokens = held_blocks * call.block_tokens
    return Placement(engine.engine_id, reason, cached_tokens, call.prompt_tokens - cached_tokens, cost, is_at_risk)
