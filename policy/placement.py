"""Placement: which engine a call runs on. E2 as published by Preble (algorithms 1 and 2), and two plain policies.

Selection has no side effects: a policy reads engine views and returns a `Placement`; the router books it. Who may be
chosen at all (healthy, not draining, serves the model) is settled before: `engines` holds only the eligible ones.
`e2` lacks two parts of the paper so far: decode balance (explore only) and shift (exploit only), see DESIGN 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from policy.engine_view import EngineView
from policy.prefix_tree import Segment
from policy.types import Call, LoadCost, Placement, PlacementReason


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy decides from: the call's matched path, the eligible engines in a fixed order, and how many calls
    were placed before this one.
    """

    path: Sequence[Segment]
    engines: Sequence[EngineView]
    turn: int


Policy = Callable[[Call, Situation], Placement]


def e2(call: Call, situation: Situation) -> Placement:
    """Exploit a cached prefix when that saves more tokens than it leaves to compute, else explore (algorithm 1)."""
    held = {engine: cached_blocks(call, situation, engine) for engine in situation.engines}
    cached_len = max(held.values()) * call.block_tokens
    missed_len = call.prompt_tokens - cached_len
    if missed_len < cached_len:
        reason, candidates = PlacementReason.EXPLOIT, holders_of_key_portion(situation.path, held)
    else:
        reason, candidates = PlacementReason.EXPLORE, list(situation.engines)
    costs = [(load_cost(call, situation, engine, held[engine] * call.block_tokens), engine) for engine in candidates]
    # Of equal engines the one with the fewest outstanding calls, then the first: the paper leaves ties open.
    cost, engine = min(costs, key=lambda pair: (pair[0].total_s, pair[1].outstanding))
    return _placement(call, engine, reason, held[engine], cost)


def load_cost(call: Call, situation: Situation, engine: EngineView, cached_tokens: int) -> LoadCost:
    """L + M + P of placing `call` on `engine`, which has `cached_tokens` of its prompt (algorithm 2)."""
    missed_tokens = call.prompt_tokens - cached_tokens
    return LoadCost(
        window_s=engine.ledger.window_cost_s(),
        eviction_s=eviction_cost_s(call, situation, engine, missed_tokens),
        prefill_s=engine.cost_model.prefill_time_s(missed_tokens, cached_tokens),
    )


def eviction_cost_s(call: Call, situation: Situation, engine: EngineView, missed_tokens: int) -> float:
    """M: for each node LRU would evict to make room, the time to compute it again x its share of the window's calls."""
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


def holders_of_key_portion(path: Sequence[Segment], held: Mapping[EngineView, int]) -> list[EngineView]:
    """The engines that hold the key portion: the node with the most tokens on the matched path (the deepest of equals).

    `held` says how many blocks of the path each engine has; what none has is not matched. An engine holds a node if it
    has everything before it and at least half of what any engine has of it: with less, by E2's own rule of saved
    against computed tokens, it would not count as cached.
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
    """The engine with the fewest outstanding calls; among equals, each in turn."""
    fewest = min(engine.outstanding for engine in situation.engines)
    idle = [engine for engine in situation.engines if engine.outstanding == fewest]
    engine = idle[situation.turn % len(idle)]
    return _placement(call, engine, PlacementReason.LEAST_OUTSTANDING, cached_blocks(call, situation, engine))


def cached_blocks(call: Call, situation: Situation, engine: EngineView) -> int:
    """Blocks of the prompt that the engine is expected to have; never all, as the last token is always computed."""
    return min(call.cacheable_blocks, engine.residency.held_blocks(situation.path))


def _placement(
    call: Call, engine: EngineView, reason: PlacementReason, held_blocks: int, cost: LoadCost | None = None
) -> Placement:
    cached_tokens = held_blocks * call.block_tokens
    return Placement(engine.engine_id, reason, cached_tokens, call.prompt_tokens - cached_tokens, cost)


POLICIES: dict[str, Policy] = {"e2": e2, "round_robin": round_robin, "least_outstanding": least_outstanding}
"""The policies by the name that configuration uses."""
