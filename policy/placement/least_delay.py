"""The policy `plait`: a call goes to the engine where it delays itself and all others least.

In a large fleet, few engines are looked at: those whose floor is below the best offer so far (branch and bound). The
outcome is that of looking at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop
from itertools import islice
from math import inf

from plait.policy.cost_model import CostModel
from plait.policy.placement.delay import Asked, Offer, Rank, offer
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.group_delay import best_for_group
from plait.policy.placement.situation import Situation, placed
from plait.policy.types import Call, Placement, PlacementReason

FEW = 4
"""So many engines are looked at one by one: that takes less time than to compute their floors first. With 8 engines,
floors take half the time (`python -m benchmarks placement`).
"""

MOST_FOR_GROUP = 16
"""So many engines are looked at for a call of a task group. The next call of the group may find others."""

ROUNDING = 1 - 1e-9
"""A floor and a cost that are equal may differ by the order in which they were added up."""


def least_delay(call: Call, situation: Situation) -> Placement:
    """The engine with the least delay. Ties: in turn.

    A call with a TTFT goes to an engine that is expected to meet it. If none is, the placement is at risk, and the call
    goes where its first token is expected first. A call of a task group without a TTFT goes where that is best for the
    whole group.
    """
    asked = Asked.of(call, situation)
    first = situation.turn % len(situation.engines)
    engines = [*situation.engines[first:], *situation.engines[:first]]
    if situation.siblings and asked.ttft_s == inf:
        best = best_for_group(asked, situation.siblings, _offers(asked, situation, engines))
    else:
        best = (best_of_all if len(engines) <= FEW else best_of_many)(asked, situation, engines)
    exploits = 2 * best.held_blocks * call.block_tokens > call.prompt_tokens
    reason = PlacementReason.EXPLOIT if exploits else PlacementReason.EXPLORE
    return placed(call, best.engine, reason, best.held_blocks, best.cost, is_at_risk=best.rank[0] > 0)


def best_of_all(asked: Asked, situation: Situation, engines: Iterable[EngineView]) -> Offer:
    """The best offer; of equal ones the first."""
    return min((offer(asked, situation, engine) for engine in engines), key=lambda one: one.rank)


def best_of_many(asked: Asked, situation: Situation, engines: Sequence[EngineView]) -> Offer:
    """As `best_of_all`, without looking at every engine. An offer that misses the TTFT is compared with all."""
    best: tuple[Rank, int] | None = None
    chosen: Offer | None = None
    for floor_s, place in _by_floor(asked, situation, engines):
        if best is not None and best[0][0] == 0.0 and floor_s >= ROUNDING * best[0][1]:
            break
        found = offer(asked, situation, engines[place])
        if best is None or (found.rank, place) < best:
            best, chosen = (found.rank, place), found
    assert chosen is not None
    return chosen


def _offers(asked: Asked, situation: Situation, engines: Sequence[EngineView]) -> list[Offer]:
    """The offers of all engines; in a large fleet, of those with the lowest floors."""
    if len(engines) > MOST_FOR_GROUP:
        engines = [engines[place] for _, place in islice(_by_floor(asked, situation, engines), MOST_FOR_GROUP)]
    return [offer(asked, situation, engine) for engine in engines]


def _by_floor(asked: Asked, situation: Situation, engines: Sequence[EngineView]) -> Iterator[tuple[float, int]]:
    """The least that the call can cost on each engine, with its place, in ascending order."""
    output_tokens, now_s, passed = asked.output_tokens, situation.now_s, situation.passed
    models = {id(engine.cost_model): engine.cost_model for engine in engines}.values()
    levels, prefills = _levels(asked.call, situation, engines, models)
    token_s = min(costs.context_s / costs.efficiency for costs in models)
    deeper_s = output_tokens * token_s * (asked.call.prompt_tokens + output_tokens / 2)
    waits = asked.ttft_s == inf  # an engine may serve an urgent call before all that wait
    heap = []
    for place, engine in enumerate(engines):
        floor = engine.floor or engine.find_floor()
        queue_s, head_s, most_progress_s, iteration_s, deepening, calls, slowness = floor
        prefill_s, added_s = prefills[levels[place]]
        if passed.calls:
            share = passed.shares.get(engine.engine_id, 0.0)
            if share and queue_s:
                queue_s = engine.drain_s(engine.queue.sent_tokens) + engine.queue.sent_attention_s
            calls += round(passed.calls - share * engine.queue.held)
            iteration_s, deepening = engine.cost_model.decode_iteration_s(1, 0.0), 0.0
        least_s = output_tokens * iteration_s + deeper_s * deepening + added_s * calls + prefill_s
        if waits and queue_s:
            least_s += max(0.0, queue_s - min(now_s - head_s, most_progress_s))
        heap.append((slowness * least_s, place))
    heapify(heap)
    while heap:
        yield heappop(heap)


def _levels(
    call: Call, situation: Situation, engines: Sequence[EngineView], models: Collection[CostModel]
) -> tuple[Sequence[int], Sequence[tuple[float, float]]]:
    """How deep on the prompt's path each engine has a node, and for each level the least seconds of the prefill.

    Those are its own seconds, and the seconds that it adds to the iterations of others. Level 0 is off the path.
    """
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


def _least_prefill(call: Call, models: Collection[CostModel], held_blocks: int) -> tuple[float, float]:
    cached_tokens = min(call.cacheable_blocks, held_blocks) * call.block_tokens
    missed_tokens = call.prompt_tokens - cached_tokens
    attention_s = min(costs.attention_time_s(missed_tokens, cached_tokens) for costs in models)
    prefill_s = min(costs.forward(missed_tokens) / costs.efficiency for costs in models)
    return prefill_s + attention_s, min(costs.marginal_s(missed_tokens) for costs in models) + attention_s
