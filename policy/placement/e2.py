"""E2 as published by Preble (algorithms 1 and 2): exploit a cached prefix, or explore by the load of a window.

See docs/design/placement.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation, cached_prefix, placed
from plait.policy.prefix.prefix_tree import Segment
from plait.policy.types import Call, Placement, PlacementReason


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The cost of placing a call on an engine, in seconds of engine time (Preble, algorithm 2)."""

    window_s: float
    eviction_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        """L + M + P."""
        return self.window_s + self.eviction_s + self.prefill_s


def e2(call: Call, situation: Situation) -> Placement:
    """Exploit if more tokens of the prompt are cached than missed, else explore (algorithm 1)."""
    cached = {engine: cached_prefix(call, situation, engine) for engine in situation.engines}
    cached_len = max(cached.values()) * call.block_tokens
    reason, candidates = PlacementReason.EXPLORE, list(situation.engines)
    if call.prompt_tokens - cached_len < cached_len:
        reason, candidates = PlacementReason.EXPLOIT, holders_of_key_portion(situation.path, cached)
    cost, engine = _cheapest(call, situation, candidates, cached)
    return placed(call, engine, reason, cached[engine], cost)


def load_cost(call: Call, situation: Situation, engine: EngineView, cached_tokens: int) -> LoadCost:
    """L + M + P (algorithm 2): the cost of placing `call` on `engine`, which has `cached_tokens` of its prompt."""
    missed_tokens = call.prompt_tokens - cached_tokens
    return LoadCost(
        engine.ledger.window_cost_s(),
        eviction_cost_s(call, situation, engine, missed_tokens),
        engine.cost_model.prefill_time_s(missed_tokens, cached_tokens),
    )


def eviction_cost_s(call: Call, situation: Situation, engine: EngineView, missed_tokens: int) -> float:
    """M: the time to recompute each node that LRU would evict, weighted by the share of the window's calls that use it.

    0 if the engine's free room is not known or its window is empty.
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


def holders_of_key_portion(path: Sequence[Segment], cached: Mapping[EngineView, int]) -> list[EngineView]:
    """The engines that have the key portion: the node with the most tokens on the matched path; ties: the deepest.

    `cached` is the number of the path's blocks in each engine's cache. Blocks that no engine has are not matched. An
    engine has the node if it has all blocks before it, and at least half as many of its blocks as the engine with the
    most. With less than half, E2's rule (more tokens cached than missed) would not call the node cached.
    """
    matched = max(cached.values())
    key_start = key_blocks = start = 0
    for segment in path:
        blocks = min(segment.blocks, matched - start)
        if blocks >= key_blocks:
            key_start, key_blocks = start, blocks
        start += segment.blocks
    return [engine for engine, blocks in cached.items() if 2 * (blocks - key_start) >= key_blocks]


def _cheapest(
    call: Call, situation: Situation, candidates: Sequence[EngineView], cached: Mapping[EngineView, int]
) -> tuple[LoadCost, EngineView]:
    """The cheapest engine and its cost. Ties: the fewest outstanding calls, then the first (the paper has no rule)."""
    costs = [(load_cost(call, situation, engine, cached[engine] * call.block_tokens), engine) for engine in candidates]
    return min(costs, key=lambda pair: (pair[0].total_s, pair[1].outstanding))
