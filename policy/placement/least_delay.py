"""The policy `plait`: a call goes to the engine where it delays itself and all others least.

In: a call and its `Situation`. Out: a `Placement`. An `Offer` is one engine with the cost of the call there
(`costs/delay.py`). The policy keeps no state and changes none.

- Large fleets: costs are computed for a few `candidates`, which are less busy or have more of the prompt cached than
  the other engines.
- Copies: an engine without the prefix computes it, and has a copy from then on. While the engines stay as unequal as
  now, later calls save delay by the copy. This saving is taken off the offer's cost.
- Task groups: the calls come together and share a prefix. If each took its own least delay, all would crowd the engine
  with the prefix until one more call there cost more than computing the prefix elsewhere. So one more engine computes
  the prefix if the sum of the delays of all these calls is then clearly less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Final

from plait.policy.costs.delay import (
    FIRST_TOKEN_WEIGHT,
    STALLED_SHARE,
    CallToPlace,
    Offer,
    Rank,
    cost_with_copy,
    joined_cost,
    offer,
)
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation, loads_of, placed
from plait.policy.prefix.prefix_tree import USES_S
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call, Compared, Placement, Rule

SMALL: Final = 4
"""A fleet of up to this many engines is compared whole. A placement keeps this many of the cheapest offers: waiting
calls keep their placements, so few save memory.
"""

FEW: Final = 3
"""In a larger fleet, this many of the least busy engines are compared, and this many of those with the most of the
prompt cached. Six of each give the same latencies, and take a quarter longer on 8 engines.
"""

FEW_FOR_GROUP: Final = 8
"""The same for a call of a task group, whose calls are divided over engines."""

_rank: Final[Callable[[Offer], Rank]] = attrgetter("rank")
_lowest_tier: Final[Callable[[EngineView], Residency]] = attrgetter("tiers.lowest")


def least_delay(call: Call, situation: Situation) -> Placement:
    """The engine with the least delay. Ties: in turn.

    A call with a TTFT or a JCT goes to the cheapest engine that is expected to meet it, or else to the one that misses
    it by the least. A call of a task group without a TTFT goes where the sum over the group is least.
    """
    if len(situation.engines) == 1 and (call.slo is None or not call.slo.has_zero):
        engine = situation.engines[0]
        if engine.queue.expires_s <= situation.now_s:  # computing a delay would do this, which is skipped here
            engine.queue.expire(situation.now_s)
        return placed(call, engine, None, loads_of(call, situation, engine).blocks, compared=_ONLY_ENGINE)
    asked = CallToPlace.of(call, situation)
    first = situation.turn % len(situation.engines)
    engines = [*situation.engines[first:], *situation.engines[:first]]  # of equal offers, the first one wins
    rule: Rule = "group" if situation.siblings and asked.ttft_s == inf else "least_delay"
    if len(engines) > SMALL and not situation.compares_all:
        engines = candidates(asked, situation, engines, FEW_FOR_GROUP if rule == "group" else FEW)
    offers = [offer(asked, situation, engine) for engine in engines]
    if rule == "group":
        best = best_for_group(asked, situation.siblings, offers)
    else:
        repay_copies(asked, situation, offers)
        best = min(offers, key=_rank)
    cheapest = sorted(offers, key=_cost_s if asked.is_promised else _rank)
    if rule == "least_delay" and cheapest[0] is not best and asked.is_promised:
        rule = "ttft"
    following = cheapest[1] if cheapest[0] is best and len(cheapest) > 1 else cheapest[0]
    kept = cheapest if situation.compares_all else cheapest[:SMALL]
    if kept[0] is not best and not any(one is best for one in kept):
        kept.append(best)
    compared = Compared(rule, kept, len(situation.engines), None if following is best else following)
    return asked.placed(best.engine, best.cached_blocks, best.cost, compared)


def _cost_s(offer: Offer) -> float:
    return offer.rank[1]


_ONLY_ENGINE: Final = Compared("only_engine", engines=1)


def candidates(asked: CallToPlace, situation: Situation, engines: Sequence[EngineView], few: int) -> list[EngineView]:
    """The `few` least busy engines, and the `few` with the most of the prompt cached: of equally much, the least busy.

    An engine is the busier the later it would have computed the whole prompt, and the more calls this delays. The loops
    run for each call over each engine of a large fleet, so their bodies make no function call.
    """
    lines, now_s, call = situation.overtaken.lines, situation.now_s, asked.call
    is_urgent = call.slo is not None and call.is_urgent(now_s)
    prompt_tokens, busy_s = call.prompt_tokens, list[float]()
    for engine in engines:
        queue = engine.queue
        if queue.expires_s <= now_s:
            queue.expire(now_s)
        tokens = queue.sent_tokens if engine.engine_id in lines else queue.tokens
        if is_urgent and engine.urgent_first:
            tokens = queue.on_time_tokens
        work_tokens = FIRST_TOKEN_WEIGHT * (tokens + prompt_tokens) + STALLED_SHARE * prompt_tokens * engine.calls
        busy_s.append(engine.slowness * work_tokens / engine.cost_model.tokens_per_s)
    by_busy = sorted(range(len(engines)), key=busy_s.__getitem__)
    chosen = set(by_busy[:few])
    most_blocks = dict[str, int]()
    for node, blocks in situation.path:
        for holding in node.holdings.values():
            cached = blocks if holding.bookings else holding.resident_blocks - holding.leaving_blocks
            if cached:
                most_blocks[holding.engine_id] = node.start_blocks + (cached if cached < blocks else blocks)
    if most_blocks:
        lowest = map(_lowest_tier, engines)
        most = [0 if one.finds_nothing else most_blocks.get(one.engine_id, 0) for one in lowest]
        chosen.update(sorted(by_busy, key=most.__getitem__, reverse=True)[:few])
    return [engines[place] for place in sorted(chosen)]


REPAID = 4.0
"""The engines are taken to stay as unequal as now for this multiple of one call's duration. A copy is credited with
the uses of this time.
"""

IN_ROOM = 5.0
"""Where there is room, a copy is credited with so many times these uses: it stays, and nobody waits for its prefill.

An engine has none if it would evict something in use for it, or was given prompts for more than `BUSY` of its time.
Copies are prompts, so they limit themselves. So does a working set that is still to come: free KV is no room yet.
"""

BUSY = 0.1
"""The part of a ledger's window in prefills at which an engine has no room. Room rises linearly to 1 at no prefills."""

BURST = 10.0
"""So many uses a minute may be a burst that ends, such as the samples of one problem. Uses beyond these go on."""


def repay_copies(asked: CallToPlace, situation: Situation, offers: Sequence[Offer]) -> None:
    """Take off the offers what a copy of the prompt's longest cached part would repay on engines without it."""
    blocks = max([one.cached_blocks for one in offers])
    holders = [one for one in offers if one.cached_blocks == blocks]
    if not blocks or len(holders) == len(offers):
        return
    node = next(segment.node for segment in situation.path if segment.node.end_blocks >= blocks)
    best, count = min(holders, key=_rank), len(holders)
    if len(offers) < len(situation.engines):
        ids = {one.engine_id for one in node.holdings.values() if one.cached_blocks >= blocks - node.start_blocks}
        count = max(count, sum([engine.tiers.lowest.engine_id in ids for engine in situation.engines]))
    lasts_s, holder_s = REPAID * (best.cost.first_token_s + best.cost.decode_s), best.rank[1]
    minute = node.uses(situation.now_s)
    uses = minute / USES_S * lasts_s / (count + 1)
    more = (IN_ROOM - 1.0) * max(0.0, 1.0 - BURST / minute) if minute else 0.0
    for one in offers:
        if one.cached_blocks < blocks:
            with_copy_s = cost_with_copy(asked, one, blocks, situation.overtaken).total_s
            room = 0.0 if one.cost.evicted_s else max(0.0, 1.0 - one.engine.ledger.prefill_share / BUSY)
            repaid_s = uses * (1.0 + more * room) * max(0.0, holder_s - with_copy_s)
            one.cost.repaid_s = repaid_s
            one.rank = one.rank[0], one.rank[1] - repaid_s


WORTH = 0.9
"""A further engine has to make the sum at least a tenth less: its prefill is certain, answers' lengths are not."""

LEAST_GROWTH = 1e-6
"""The least growth of a call's cost over the previous one's, as a part of its delay: the fill divides by the growth."""


@dataclass(frozen=True, slots=True)
class Place:
    """An engine's costs for the calls of a group, as a line: call n costs `first_s` + n * `growth_s`, from n = 0."""

    offer: Offer
    opening_s: float
    """The cost of computing the shared prefix, once."""
    first_s: float
    growth_s: float


def best_for_group(asked: CallToPlace, siblings: int, offers: Sequence[Offer]) -> Offer:
    """The offer that the call takes if it and `siblings` like it are divided over engines at the least sum of delays.

    Of the used engines, the call goes where it costs least with the prefix already cached.
    """
    shared_blocks = max(one.cached_blocks for one in offers)
    places = [_place(asked, one, shared_blocks) for one in sorted(offers, key=lambda one: one.rank)]
    return min(used(places, siblings + 1), key=lambda one: one.first_s).offer


def used(places: Sequence[Place], calls: int) -> Sequence[Place]:
    """The leading `places` that are worth using for the calls."""
    count, least_s = 1, least_sum_s(places[:1], calls)
    for more in range(2, len(places) + 1):
        sum_s = least_sum_s(places[:more], calls)
        if sum_s <= WORTH * least_s:
            count, least_s = more, sum_s
    return places[:count]


def least_sum_s(places: Sequence[Place], calls: float) -> float:
    """The least sum of delays of `calls` divided over `places`, each of which computes the prefix.

    Fractions of calls are allowed (water filling). So the next call costs the same, `level_s`, in each place with
    calls.
    """
    filled = sorted(places, key=lambda one: one.first_s)
    while True:
        level_s = (calls + sum(one.first_s / one.growth_s for one in filled)) / sum(1 / one.growth_s for one in filled)
        if level_s >= filled[-1].first_s:
            break
        filled.pop()
    delays_s = sum((level_s**2 - one.first_s**2) / (2 * one.growth_s) for one in filled)
    return delays_s + sum(one.opening_s for one in places)


def _place(asked: CallToPlace, offer: Offer, shared_blocks: int) -> Place:
    own_s = offer.cost.total_s
    second_s, third_s = (joined_cost(asked, offer, shared_blocks, others).total_s for others in (1, 2))
    growth_s = max(third_s - second_s, LEAST_GROWTH * own_s)
    first_s = min(own_s, second_s - growth_s)
    return Place(offer, own_s - first_s, first_s, growth_s)
