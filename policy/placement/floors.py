"""The least that a call can cost on each engine of a large fleet: far less work than the delay itself.

A floor leaves out what may be nothing, as evictions, and takes the best cost model of the fleet for the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

from plait.policy.cost_model import CostModel
from plait.policy.placement.delay import LATER, STALLED_SHARE, Asked
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import Situation
from plait.policy.types import FIRST_TOKEN_WEIGHT, Call


class Floors(NamedTuple):
    """By the place of an engine: the least cost of the call, and the least cost if it had a copy of so many blocks."""

    costs_s: Sequence[float]
    with_copy_s: Sequence[float]


class _Prefill(NamedTuple):
    """The least seconds of a prefill: its own, and those that it adds to the iterations of others."""

    own_s: float
    added_s: float


def floors(asked: Asked, situation: Situation, engines: Sequence[EngineView], copy_blocks: int = 0) -> Floors:
    """The floors of all engines, the second ones only for a copy of some blocks."""
    call, output_tokens, now_s, passed = asked.call, asked.output_tokens, situation.now_s, situation.passed
    models = {id(engine.cost_model): engine.cost_model for engine in engines}.values()
    levels, prefills = _levels(call, situation, engines, models)
    copied = _least_prefill(call, models, copy_blocks)
    token_s = min(costs.context_s / costs.efficiency for costs in models)
    deeper_s = output_tokens * token_s * (call.prompt_tokens + output_tokens / 2)
    later = FIRST_TOKEN_WEIGHT * LATER * asked.rate_s
    waits = asked.ttft_s == inf  # an engine may serve an urgent call before all that wait
    costs_s, with_copy_s = list[float](), list[float]()
    for place, engine in enumerate(engines):
        floor = engine.floor or engine.find_floor()
        queue_s, head_s, most_progress_s, iteration_s, deepening, calls, slowness = floor
        if passed.calls:
            share = passed.shares.get(engine.engine_id, 0.0)
            if share and queue_s:
                queue_s = engine.drain_s(engine.queue.sent_tokens) + engine.queue.sent_attention_s
            calls += round(passed.calls - share * engine.queue.held)
            iteration_s, deepening = engine.cost_model.decode_iteration_s(1, 0.0), 0.0
        queue_s = max(0.0, queue_s - min(now_s - head_s, most_progress_s)) if waits and queue_s else 0.0
        fixed_s = FIRST_TOKEN_WEIGHT * queue_s + output_tokens * iteration_s + deeper_s * deepening
        stalled, behind_s = STALLED_SHARE * calls, slowness * later
        own_s, added_s = prefills[levels[place]]
        delays_s = FIRST_TOKEN_WEIGHT * own_s + added_s * (stalled + behind_s * (queue_s + own_s / 2))
        costs_s.append(slowness * (fixed_s + delays_s))
        if copy_blocks:
            own_s, added_s = copied
            delays_s = FIRST_TOKEN_WEIGHT * own_s + added_s * (stalled + behind_s * (queue_s + own_s / 2))
            with_copy_s.append(slowness * (fixed_s + delays_s))
    return Floors(costs_s, with_copy_s)


def _levels(
    call: Call, situation: Situation, engines: Sequence[EngineView], models: Collection[CostModel]
) -> tuple[Sequence[int], Sequence[_Prefill]]:
    """How deep on the prompt's path each engine has a node, and the least prefill for each level; 0 is off the path."""
    places = {engine.engine_id: place for place, engine in enumerate(engines)}
    levels = [0] * len(engines)
    prefills = [_least_prefill(call, models, 0)]
    for level, segment in enumerate(situation.path, start=1):
        prefills.append(_least_prefill(call, models, segment.node.start_blocks + segment.blocks))
        for engine_id in segment.node.holdings:
            place = places.get(engine_id)
            if place is not None:
                levels[place] = level
    return levels, prefills


def _least_prefill(call: Call, models: Collection[CostModel], held_blocks: int) -> _Prefill:
    cached_tokens = min(call.cacheable_blocks, held_blocks) * call.block_tokens
    missed_tokens = call.prompt_tokens - cached_tokens
    attention_s = min(costs.attention_time_s(missed_tokens, cached_tokens) for costs in models)
    prefill_s = min(costs.forward(missed_tokens) / costs.efficiency for costs in models)
    return _Prefill(prefill_s + attention_s, min(costs.marginal_s(missed_tokens) for costs in models) + attention_s)
