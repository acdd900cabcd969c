"""Placement policies choose the engine of a call: E2 as published by Preble (algorithms 1 and 2), and two plain ones.

E2's cost has two more terms here, in seconds: the delay that latency and throughput calls cause each other (`harm`),
and a tie-break that keeps an application together (`application`). Calls of a task group are allocated together
(`task_group`). For a call without an objective, an application and a group both terms are 0, and E2 is as published.

Selection has no side effects. A policy reads engine views and returns a `Placement`. The router books it. `engines`
holds only eligible engines: healthy, not draining, serving the model. `e2` does not have two parts of the paper yet:
decode balance (explore only) and shift (exploit only). See docs/design/placement.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from plait.policy.placement.application import apart_s
from plait.policy.placement.capacity import decode_iteration_s
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.harm import harm_s
from plait.policy.placement.reservation import Reservation
from plait.policy.placement.task_group import Part, allocate
from plait.policy.prefix.prefix_tree import Segment
from plait.policy.types import Call, LoadCost, Placement, PlacementReason, TaskGroup


@dataclass(frozen=True, slots=True)
class Situation:
    """A policy's input.

    `path` is the call's matched path. `engines` are the eligible engines in a fixed order. `turn` is the number of
    calls placed before this one. `reservation` is the task group's; it is None if the call is placed by itself.
    """

    path: Sequence[Segment]
    engines: Sequence[EngineView]
    turn: int
    reservation: Reservation | None = None


Policy = Callable[[Call, Situation], Placement]


def e2(call: Call, situation: Situation) -> Placement:
    """Exploit if more tokens of the prompt are cached than missed, else explore (algorithm 1).

    A call of a task group takes one of the group's places instead.
    """
    if call.group is not None and situation.reservation is not None:
        return group_placement(call, situation, call.group, situation.reservation)
    held = {engine: cached_blocks(call, situation, engine) for engine in situation.engines}
    cached_len = max(held.values()) * call.block_tokens
    missed_len = call.prompt_tokens - cached_len
    reason, candidates = PlacementReason.EXPLORE, list(situation.engines)
    if missed_len < cached_len:
        holders = holders_of_key_portion(situation.path, held)
        if call.objective is not None:
            holders = [engine for engine in holders if exploiting_saves(call, engine, held[engine])]
        if holders:
            reason, candidates = PlacementReason.EXPLOIT, holders
    cost, engine = _cheapest(call, situation, candidates, held)
    return _placement(call, engine, reason, held[engine], cost=cost)


def group_placement(call: Call, situation: Situation, group: TaskGroup, reservation: Reservation) -> Placement:
    """Take the cheapest place that is left for the call's task group.

    Each known call of the group that does not run yet has one place. If there are too few places, more are added. If
    there are too many, because calls have failed, all places are allocated anew.
    """
    held = {engine: cached_blocks(call, situation, engine) for engine in situation.engines}
    wanted = max(1, group.calls - reservation.running)
    places = reservation.places
    if sum(places.values()) != wanted:
        kept = places if sum(places.values()) < wanted else {}
        parts = [_part(call, situation, group, engine, blocks) for engine, blocks in held.items()]
        places = allocate(parts, kept, wanted)
    cost, engine = _cheapest(call, situation, [engine for engine in held if engine.engine_id in places], held)
    left = {engine_id: calls - (engine_id == engine.engine_id) for engine_id, calls in places.items()}
    left = {engine_id: calls for engine_id, calls in left.items() if calls}
    return _placement(call, engine, PlacementReason.GROUP, held[engine], cost=cost, places=left)


def load_cost(call: Call, situation: Situation, engine: EngineView, cached_tokens: int) -> LoadCost:
    """The cost of placing `call` on `engine`, which has `cached_tokens` of its prompt.

    It is L + M + P (algorithm 2), plus harm and the cost of separating the application.
    """
    missed_tokens = call.prompt_tokens - cached_tokens
    window_s = engine.ledger.window_cost_s()
    eviction_s = eviction_cost_s(call, situation, engine, missed_tokens)
    prefill_s = engine.cost_model.prefill_time_s(missed_tokens, cached_tokens)
    if call.unannotated:
        return LoadCost(window_s, eviction_s, prefill_s)
    harm = harm_s(call, engine, missed_tokens, prefill_s)
    return LoadCost(window_s, eviction_s, prefill_s, harm, apart_s(call, engine))


def eviction_cost_s(call: Call, situation: Situation, engine: EngineView, missed_tokens: int) -> float:
    """M: the time to recompute each node that LRU would evict, weighted by the share of the window's calls that use it.

    It is 0 if the engine's free room is not known or its window is empty.
    """
    calls = len(engine.ledger)
    if engine.free_tokens is None or not calls:
        return 0.0
    shortage_tokens = missed_tokens + engine.ledger.mean_output_tokens - engine.free_tokens
    own = {segment.node for segment in situation.path}
    total_s = 0.0
    for node, blocks in engine.residency.victims(ceil(shortage_tokens / call.block_tokens), own):
        sharers = node.holdings[engine.engine_id].sharers
        if sharers:
            total_s += engine.cost_model.prefill_time_s(blocks * call.block_tokens) * sharers / calls
    return total_s


def exploiting_saves(call: Call, engine: EngineView, held_blocks: int) -> bool:
    """Whether the time that the cached part saves on `engine` is at least the harm that the call does there."""
    cached_tokens = held_blocks * call.block_tokens
    missed_tokens, costs = call.prompt_tokens - cached_tokens, engine.cost_model
    prefill_s = costs.prefill_time_s(missed_tokens, cached_tokens)
    return harm_s(call, engine, missed_tokens, prefill_s) <= costs.prefill_time_s(call.prompt_tokens) - prefill_s


def holders_of_key_portion(path: Sequence[Segment], held: Mapping[EngineView, int]) -> list[EngineView]:
    """The engines that hold the key portion: the node with the most tokens on the matched path; ties: the deepest.

    `held` has the number of path blocks that each engine holds. Blocks that no engine holds do not count as matched. An
    engine holds the node if it has all blocks before the node, and at least half as many of the node's blocks as the
    engine with the most. With less than half, E2's rule (more tokens cached than missed) would not call it cached.
    """
    matched = max(held.values())
    key_start = key_blocks = start = 0
    for segment in path:
        blocks = min(segment.blocks, matched - start)
        if blocks >= key_blocks:
            key_start, key_blocks = start, blocks
        start += segment.blocks
    return [engine for engine, blocks in held.items() if 2 * (blocks - key_start) >= key_blocks]


def round_robin(call: Call, situation: Situation) -> Placement:
    """Each engine in turn."""
    engine = situation.engines[situation.turn % len(situation.engines)]
    return _placement(call, engine, PlacementReason.ROUND_ROBIN, cached_blocks(call, situation, engine))


def least_outstanding(call: Call, situation: Situation) -> Placement:
    """The engine with the fewest outstanding calls; ties: in turn."""
    fewest = min(engine.outstanding for engine in situation.engines)
    idle = [engine for engine in situation.engines if engine.outstanding == fewest]
    engine = idle[situation.turn % len(idle)]
    return _placement(call, engine, PlacementReason.LEAST_OUTSTANDING, cached_blocks(call, situation, engine))


def cached_blocks(call: Call, situation: Situation, engine: EngineView) -> int:
    """Blocks of the prompt that the engine is expected to have cached, less any block with the last prompt token."""
    return min(call.cacheable_blocks, engine.residency.held_blocks(situation.path))


def _cheapest(
    call: Call, situation: Situation, candidates: Sequence[EngineView], held: Mapping[EngineView, int]
) -> tuple[LoadCost, EngineView]:
    """The cheapest engine and its cost. Ties: the fewest outstanding calls, then the first (the paper has no rule)."""
    costs = [(load_cost(call, situation, engine, held[engine] * call.block_tokens), engine) for engine in candidates]
    return min(costs, key=lambda pair: (pair[0].total_s, pair[1].outstanding))


def _part(call: Call, situation: Situation, group: TaskGroup, engine: EngineView, held_blocks: int) -> Part:
    """The costs on one engine of a task group whose calls are all like this one."""
    costs, output_tokens = engine.cost_model, engine.ledger.mean_output_tokens
    cached_tokens = held_blocks * call.block_tokens
    cost = load_cost(call, situation, engine, cached_tokens)
    shared_tokens = max(cached_tokens, min(group.shared_tokens, call.prompt_tokens - 1))
    next_tokens, context_tokens = call.prompt_tokens - shared_tokens, call.prompt_tokens + int(output_tokens / 2)
    return Part(
        engine.engine_id,
        load_s=cost.total_s - cost.prefill_s,
        first_s=cost.prefill_s,
        next_s=costs.prefill_time_s(next_tokens, shared_tokens),
        decode_s=lambda calls: output_tokens * decode_iteration_s(costs, calls, context_tokens),
        first_tokens=call.prompt_tokens - cached_tokens + output_tokens,
        next_tokens=next_tokens + output_tokens,
        room_tokens=engine.room_tokens,
    )


def _placement(
    call: Call,
    engine: EngineView,
    reason: PlacementReason,
    held_blocks: int,
    *,
    cost: LoadCost | None = None,
    places: Mapping[str, int] | None = None,
) -> Placement:
    cached_tokens = held_blocks * call.block_tokens
    return Placement(engine.engine_id, reason, cached_tokens, call.prompt_tokens - cached_tokens, cost, places)


POLICIES: dict[str, Policy] = {"e2": e2, "round_robin": round_robin, "least_outstanding": least_outstanding}
"""The policies by their names in the configuration."""
