"""The least that a call can cost on each engine of a large fleet: far less work than the delay itself.

A floor leaves out what may be nothing, as evictions, and takes the best cost model of the fleet for the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

from plait.policy.cost_model import CostModel
from plait.policy.placement.delay import LATER, STALLED_SHARE, Asked
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import Passed, Situation
from plait.policy.types import FIRST_TOKEN_WEIGHT, Call


class Floors(NamedTuple):
    """By the place of an engine: the least cost of the call, and the least cost if it had a copy of so many blocks."""

    costs_s: Sequence[float]
    with_copy_s: Sequence[float]


class _Prefill(NamedTuple):
    """The least seconds of a prefill: its own, weighed, and half of them; what it adds to the iterations of others."""

    weighed_s: float
    half_s: float
    added_s: float


_cost_model = attrgetter("cost_model")


def floors(asked: Asked, situation: Situation, engines: Sequence[EngineView], copy_blocks: int = 0) -> Floors:
    """The floors of all engines, the second ones only for a copy of some blocks.

    The loop is run for each call and each engine of a large fleet. So it calls nothing.
    """
    call, output_tokens, now_s, passed = asked.call, asked.output_tokens, situation.now_s, situation.passed
    models = _models(engines)
    levels, prefills = _levels(call, situation, models)
    copy_own_s, copy_half_s, copy_added_s = _least_prefill(call, models, copy_blocks)
    token_s = min(costs.context_s / costs.efficiency for costs in models)
    deeper_s = output_tokens * token_s * (call.prompt_tokens + output_tokens / 2)
    weight, later, stalled = FIRST_TOKEN_WEIGHT, FIRST_TOKEN_WEIGHT * LATER * asked.rate_s, STALLED_SHARE
    most_wait_s = asked.most_wait_s
    waits = asked.ttft_s == inf  # an engine may serve an urgent call before all that wait
    costs_s, with_copy_s = list[float](), list[float]()
    for engine in engines:
        until_s, least_s, iteration_s, deepening, calls, slowness = engine.floor or engine.find_floor()
        queue_s = until_s - now_s
        if queue_s < least_s:  # noqa: PLR1730 - a call of `max` would take a third of the loop
            queue_s = least_s
        if passed.calls:
            queue_s, calls = _passing(engine, passed, queue_s, calls)
            iteration_s, deepening = engine.cost_model.decode_iteration_s(1, 0.0), 0.0
        if not waits:
            queue_s = 0.0
        fixed_s = weight * queue_s + output_tokens * iteration_s + deeper_s * deepening
        own_s, half_s, added_s = prefills[levels.get(engine.engine_id, 0)]
        wait_s = slowness * (queue_s + half_s)
        if wait_s > most_wait_s:  # noqa: PLR1730
            wait_s = most_wait_s
        costs_s.append(slowness * (fixed_s + own_s + added_s * (stalled * calls + later * wait_s)))
        if copy_blocks:
            wait_s = slowness * (queue_s + copy_half_s)
            if wait_s > most_wait_s:  # noqa: PLR1730
                wait_s = most_wait_s
            delays_s = copy_own_s + copy_added_s * (stalled * calls + later * wait_s)
            with_copy_s.append(slowness * (fixed_s + delays_s))
    return Floors(costs_s, with_copy_s)


def _passing(engine: EngineView, passed: Passed, queue_s: float, calls: int) -> tuple[float, int]:
    """The queue and the calls of an engine for a call that passes some that wait."""
    share = passed.shares.get(engine.engine_id, 0.0)
    if share and queue_s:
        sent_s = engine.drain_s(engine.queue.sent_tokens) + engine.queue.sent_attention_s
        queue_s = max(0.0, sent_s - engine.queue.most_progress_s)
    return queue_s, calls + round(passed.calls - share * engine.queue.held)


def _models(engines: Sequence[EngineView]) -> Collection[CostModel]:
    """The cost models of the fleet, of which there are few."""
    if len(set(map(id, map(_cost_model, engines)))) == 1:
        return (engines[0].cost_model,)
    return {id(engine.cost_model): engine.cost_model for engine in engines}.values()


def _levels(
    call: Call, situation: Situation, models: Collection[CostModel]
) -> tuple[Mapping[str, int], Sequence[_Prefill]]:
    """How deep on the prompt's path engines have a node, and the least prefill for each level; 0 is off the path."""
    levels = dict[str, int]()
    prefills = [_least_prefill(call, models, 0)]
    for level, segment in enumerate(situation.path, start=1):
        prefills.append(_least_prefill(call, models, segment.node.start_blocks + segment.blocks))
        node = segment.node
        if node.first is not None:
            levels[node.first.engine_id] = level
            levels.update(dict.fromkeys(node.others, level))
    return levels, prefills


def _least_prefill(call: Call, models: Collection[CostModel], held_blocks: int) -> _Prefill:
    cached_tokens = held_blocks * call.block_tokens
    if cached_tokens >= call.prompt_tokens:  # the last token is always computed
        cached_tokens = call.cacheable_blocks * call.block_tokens
    missed_tokens = call.prompt_tokens - cached_tokens
    own_s = added_s = inf
    for costs in models:
        attention_s = costs.attention_time_s(missed_tokens, cached_tokens)
        own_s = min(own_s, costs.forward(missed_tokens) / costs.efficiency + attention_s)
        added_s = min(added_s, costs.marginal_s(missed_tokens) + attention_s)
    return _Prefill(FIRST_TOKEN_WEIGHT * own_s, own_s / 2, added_s)
