"""The policy `plait`: a call goes to the engine where it delays itself and all others least.

In: a call and its `Situation`. Out: a `Placement`. An `Offer` is one engine with the cost of the call there
(`costs/delay.py`). The policy keeps no state and changes none.

- Large fleets: computing a cost takes longer than computing a floor, a lower bound of the cost. A branch and bound
  computes costs only for engines whose floor is below the best offer so far. The outcome is that of all offers.
- Copies: an engine without the prefix computes it, and has a copy from then on. While the engines stay as unequal as
  now, later calls save delay by the copy. This saving is taken off the offer's cost.
- Task groups: the calls come together and share a prefix. If each took its own least delay, all would crowd the engine
  with the prefix until one more call there cost more than computing the prefix elsewhere. So one more engine computes
  the prefix if the sum of the delays of all these calls is then clearly less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, nsmallest
from math import inf
from operator import attrgetter
from typing import Final, NamedTuple, Self

from plait.policy.costs.cost_model import CostModel
from plait.policy.costs.delay import (
    FIRST_TOKEN_WEIGHT,
    LATER,
    STALLED_SHARE,
    CallToPlace,
    Offer,
    Rank,
    calls_beside,
    cost_with_copy,
    counted,
    joined_cost,
    offer,
)
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Overtaken, Situation, loads_of, placed
from plait.policy.prefix.prefix_tree import USES_S
from plait.policy.types import Call, Compared, Placement, Rule

FEW: Final = 4
"""Up to this many engines, computing all costs is faster than computing floors first. With 8 engines, floors take half
the time (`python -m benchmarks placement`).
"""

MOST_FOR_GROUP: Final = 16
"""A call of a task group compares at most this many engines. The next call of the group may compare others."""

ROUNDING: Final = 1e-9

_rank: Final[Callable[[Offer], Rank]] = attrgetter("rank")


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
    rule: Rule = "least_delay"
    others_s = inf
    if situation.siblings and asked.ttft_s == inf:
        offers, others_s = _offers(asked, situation, engines)
        best, rule = best_for_group(asked, situation.siblings, offers), "group"
    elif len(engines) <= FEW:
        offers = with_copies(asked, situation, engines, list(map(partial(offer, asked, situation), engines)))
        best = min(offers, key=_rank)
    else:
        search = best_of_many(asked, situation, engines)
        best, offers, others_s = search.best, search.offers, search.others_s
    if len(offers) > FEW:
        offers, dropped_s = _kept(best, offers, max(MOST_KEPT, situation.compares))
        others_s = min(others_s, dropped_s)
    if rule == "least_delay" and not asked.ttft_s == asked.jct_s == inf and _cheapest(offers) is not best:
        rule = "ttft"
    compared = Compared(rule, offers, len(engines), others_s)
    return asked.placed(best.engine, best.cached_blocks, best.cost, compared)


_ONLY_ENGINE: Final = Compared("only_engine", engines=1)

MOST_KEPT: Final = 3
"""A placement keeps this many of the best offers, and the cheapest. Waiting calls keep their placements, so few offers
save memory.
"""


def _kept(best: Offer, offers: Sequence[Offer], count: int) -> tuple[Sequence[Offer], float]:
    """(the `best`, the cheapest, and the `count` best others; a lower bound on the cost of the rest)."""
    first = {id(best): best} | {id(one): one for one in nsmallest(count, offers, key=_rank)}
    cheapest = _cheapest(offers)
    kept = first | {id(cheapest): cheapest}
    return list(kept.values()), min([one.cost.total_s for one in offers if id(one) not in kept], default=inf)


def _cheapest(offers: Sequence[Offer]) -> Offer:
    """The first of the offers with the least cost, even if it misses a TTFT or JCT."""
    return min(offers, key=lambda one: one.cost.total_s)


def with_copies(
    asked: CallToPlace, situation: Situation, engines: Sequence[EngineView], offers: Sequence[Offer]
) -> Sequence[Offer]:
    """`offers`, one an engine, less what a copy of the prompt's longest cached part would repay there."""
    found = longest(asked, situation, engines, offers)
    if found is None:
        return offers
    copy = Copy.of(situation, found, min((offers[place] for place in sorted(found.holders)), key=_rank))
    overtaken = situation.overtaken
    return [one if place in found.holders else copy.on(asked, overtaken, one) for place, one in enumerate(offers)]


def best_of_many(asked: CallToPlace, situation: Situation, engines: Sequence[EngineView]) -> Search:
    """Search for the offer that is the best `with_copies` of all engines, without computing every cost.

    Every cost is computed while the best offer misses the TTFT or the JCT: a floor says nothing about lateness.
    """
    search, found = Search(asked, situation, engines), longest(asked, situation, engines)
    if found is None:
        search.over(zip(floors(asked, situation, engines).costs_s, range(len(engines)), strict=True))
    else:
        least = floors(asked, situation, engines, found.blocks)
        search.over((least.costs_s[place], place) for place in found.holders)
        search.copy = Copy.of(situation, found, search.best)
        least_s = search.copy.least_with(*least)
        for place in found.holders:
            least_s[place] = inf  # looked at before
        search.over(zip(least_s, range(len(engines)), strict=True))
    if situation.compares:
        search.compare(situation.compares, () if found is None else found.holders)
    return search


class Search:
    """A branch and bound over `engines`. `best` is the best of the `offers` so far.

    `copy`, if there is one, is taken off the cost of the engines that the search computes from then on.
    """

    __slots__ = ("_asked", "_engines", "_heaps", "_place", "_situation", "best", "copy", "offers")

    def __init__(self, asked: CallToPlace, situation: Situation, engines: Sequence[EngineView]) -> None:
        self.best: Offer
        self.copy: Copy | None = None
        self.offers: list[Offer] = []
        self._asked = asked
        self._situation = situation
        self._engines = engines
        self._heaps: list[list[tuple[float, int]]] = []  # (floor, place) of the engines without an offer
        self._place = -1  # the place of `best` among the engines

    @property
    def others_s(self) -> float:
        """A lower bound on the cost of every engine without an offer."""
        return min([heap[0][0] for heap in self._heaps if heap], default=inf)

    def over(self, least: Iterable[tuple[float, int]]) -> None:
        """Search these engines too, given as (floor in seconds, place). An infinite floor leaves an engine out."""
        heap = list(least)
        heapify(heap)
        best = self.best if self._place >= 0 else None
        while heap:
            floor_s, place = heap[0]
            if best is not None and best.rank[0] == 0.0 and floor_s >= _rounded(best.rank[1]):
                break
            if floor_s == inf:
                break
            heappop(heap)
            found = self._offer(place)
            if best is None or (found.rank, place) < (best.rank, self._place):
                best, self._place = found, place
        assert best is not None
        self.best = best
        self._heaps.append(heap)

    def compare(self, count: int, holders: Collection[int]) -> None:
        """Search on until the best `count` offers are known. The `holders` have the prefix and make no copy."""
        heap = [one for heap in self._heaps for one in heap if one[0] < inf]
        heapify(heap)
        self._heaps, copy = [heap], self.copy
        while heap:
            known = nsmallest(count, self.offers, key=_rank)
            if len(known) == count and not known[-1].rank[0] and heap[0][0] >= _rounded(known[-1].rank[1]):
                break
            _, place = heappop(heap)
            self.copy = None if place in holders else copy
            self._offer(place)

    def _offer(self, place: int) -> Offer:
        found = offer(self._asked, self._situation, self._engines[place])
        if self.copy is not None:
            found = self.copy.on(self._asked, self._situation.overtaken, found)
        self.offers.append(found)
        return found


def _offers(asked: CallToPlace, situation: Situation, engines: Sequence[EngineView]) -> tuple[Sequence[Offer], float]:
    """(offers, lower bound on the cost of the rest). In a large fleet only the engines with the lowest floors offer."""
    others_s = inf
    if len(engines) > MOST_FOR_GROUP:
        least_s = floors(asked, situation, engines).costs_s
        places = nsmallest(MOST_FOR_GROUP + 1, range(len(engines)), least_s.__getitem__)
        others_s = least_s[places.pop()]
        engines = [engines[place] for place in places]
    return [offer(asked, situation, engine) for engine in engines], others_s


def _rounded(seconds: float) -> float:
    """A little less than `seconds`: a floor and an equal cost may differ by rounding, as they sum in another order."""
    return seconds - ROUNDING * abs(seconds)


REPAID = 4.0
"""The engines are taken to stay as unequal as now for this multiple of one call's duration. A copy is credited with
the uses of this time.
"""


class Longest(NamedTuple):
    """The longest cached part of a prompt: its blocks, and the places of the engines that have all of them."""

    blocks: int
    holders: Collection[int]


def longest(
    asked: CallToPlace, situation: Situation, engines: Sequence[EngineView], offers: Sequence[Offer] = ()
) -> Longest | None:
    """Find the longest cached part; None if no engine has any, or all have the same length.

    The search goes from the deepest node upwards, and ends where no engine can have more. `offers` are those of all
    engines, or empty.
    """
    cached: dict[int, int] = {}
    best = 0
    for segment in reversed(situation.path):
        if best and best >= min(asked.call.cacheable_blocks, segment.node.start_blocks + segment.blocks):
            break
        node = segment.node
        first_id, others = node.first.engine_id if node.first is not None else None, node.others
        for place, engine in enumerate(engines):
            lowest_id = engine.tiers.lowest.engine_id
            if (lowest_id == first_id or lowest_id in others) and place not in cached:
                blocks = offers[place].cached_blocks if offers else loads_of(asked.call, situation, engine).blocks
                cached[place] = blocks
                best = max(best, blocks)
    holders = [place for place, found in cached.items() if found == best]
    return Longest(best, holders) if best and len(holders) < len(engines) else None


class Copy(NamedTuple):
    """A copy of a prompt's first `blocks`. It will serve `uses` calls, each of which costs `holder_s` without it."""

    blocks: int
    holder_s: float
    uses: float

    @classmethod
    def of(cls, situation: Situation, found: Longest, best: Offer) -> Self:
        """`best` is the best offer of the engines in `found`."""
        node = next(segment.node for segment in situation.path if segment.node.end_blocks >= found.blocks)
        lasts_s = REPAID * (best.cost.first_token_s + best.cost.decode_s)
        uses = node.uses(situation.now_s) / USES_S * lasts_s / (len(found.holders) + 1)
        return cls(found.blocks, best.cost.total_s, uses)

    def least_with(self, costs_s: Sequence[float], with_copy_s: Sequence[float]) -> list[float]:
        """The floors of all engines, less what the copy repays there, without a function call for each engine."""
        holder_s, uses = self.holder_s, self.uses
        return [
            cost_s - uses * (holder_s - copy_s) if copy_s < holder_s else cost_s
            for cost_s, copy_s in zip(costs_s, with_copy_s, strict=True)
        ]

    def on(self, asked: CallToPlace, overtaken: Overtaken, offer: Offer) -> Offer:
        """Take what the copy repays off the offer of an engine without these blocks."""
        with_copy_s = cost_with_copy(asked, offer, self.blocks, overtaken).total_s
        repaid_s = self.uses * max(0.0, self.holder_s - with_copy_s)
        if repaid_s:
            offer.cost.repaid_s = repaid_s
            offer.rank = offer.rank[0], offer.cost.total_s
        return offer


class Floors(NamedTuple):
    """By the place of an engine: the least cost of the call, and the least cost if the engine had the copy.

    A floor is cheap to compute: it leaves out the parts of a delay that may be 0, like evictions, and computes the
    prompt by the fastest cost model of the fleet.
    """

    costs_s: Sequence[float]
    with_copy_s: Sequence[float]


class _Prefill(NamedTuple):
    """Lower bounds on the seconds of a prefill, without the engine's slowness."""

    weighed_s: float
    """Its own time, times `FIRST_TOKEN_WEIGHT`."""
    half_s: float
    """Half of its own time."""
    added_s: float
    """What the prefill adds to the iterations of decodes."""
    later: float
    """The weighted delay of later calls for each second that this prefill waits."""


_cost_model = attrgetter("cost_model")


def floors(asked: CallToPlace, situation: Situation, engines: Sequence[EngineView], copy_blocks: int = 0) -> Floors:
    """The floors of all engines; `with_copy_s` is empty without `copy_blocks`.

    The loop runs for each call over each engine of a large fleet, so its body makes no function call.
    """
    call, output_tokens, now_s, overtaken = asked.call, asked.output_tokens, situation.now_s, situation.overtaken
    models = _models(engines)
    most_blocks, prefills = _prefills(asked, situation, models)
    copy_own_s, copy_half_s, copy_added_s, copy_later = _least_prefill(asked, models, copy_blocks)
    token_s = min(costs.context_s / costs.efficiency for costs in models)
    deeper_s = output_tokens * token_s * (call.prompt_tokens + output_tokens / 2)
    weight, stalled = FIRST_TOKEN_WEIGHT, STALLED_SHARE
    most_wait_s = asked.most_wait_s
    waits = call.due_s == inf  # an engine may serve an urgent call at once, so its floor has no queue
    costs_s, with_copy_s = list[float](), list[float]()
    for engine in engines:
        until_s, least_s, iteration_s, deepening, calls, slowness = engine.floor or engine.find_floor()
        queue_s = until_s - now_s
        delayed: float = calls
        if queue_s < least_s:  # a call of `max` would take a third of the loop
            queue_s = least_s
        if overtaken.calls:
            queue_s, delayed = _overtaking(asked, engine, overtaken, queue_s)
            iteration_s, deepening = engine.cost_model.decode_iteration_s(1, 0.0), 0.0
        if not waits:
            queue_s = 0.0
        fixed_s = weight * queue_s + output_tokens * iteration_s + deeper_s * deepening
        own_s, half_s, added_s, later = prefills[most_blocks.get(engine.tiers.lowest.engine_id, 0)]
        wait_s = slowness * (queue_s + half_s)
        if wait_s > most_wait_s:
            wait_s = most_wait_s
        costs_s.append(slowness * (fixed_s + own_s + added_s * stalled * delayed + later * wait_s))
        if copy_blocks:
            wait_s = slowness * (queue_s + copy_half_s)
            if wait_s > most_wait_s:
                wait_s = most_wait_s
            delays_s = copy_own_s + copy_added_s * stalled * delayed + copy_later * wait_s
            with_copy_s.append(slowness * (fixed_s + delays_s))
    return Floors(costs_s, with_copy_s)


def _overtaking(asked: CallToPlace, engine: EngineView, overtaken: Overtaken, queue_s: float) -> tuple[float, float]:
    """(queue seconds, calls as `counted`) of an engine for a call that overtakes calls in the gateway's lines."""
    if queue_s and engine.engine_id in overtaken.lines:
        sent_s = engine.drain_s(engine.queue.sent_tokens) + engine.queue.sent_attention_s
        queue_s = max(0.0, sent_s - engine.queue.most_progress_s)
    return queue_s, counted(asked, engine, calls_beside(engine, overtaken))


def _models(engines: Sequence[EngineView]) -> Collection[CostModel]:
    """The distinct cost models of the fleet: one for each kind of engine."""
    if len(set(map(id, map(_cost_model, engines)))) == 1:
        return (engines[0].cost_model,)
    return {id(engine.cost_model): engine.cost_model for engine in engines}.values()


def _prefills(
    asked: CallToPlace, situation: Situation, models: Collection[CostModel]
) -> tuple[Mapping[str, int], Mapping[int, _Prefill]]:
    """(by engine, the most blocks of the prompt it can have; the least prefill for each such number)."""
    most_blocks = dict[str, int]()
    for node, blocks in situation.path:
        if node.first is not None:
            end_blocks = node.start_blocks + blocks
            most_blocks[node.first.engine_id] = end_blocks
            if node.others:
                most_blocks.update(dict.fromkeys(node.others, end_blocks))
    return most_blocks, {blocks: _least_prefill(asked, models, blocks) for blocks in {0, *most_blocks.values()}}


def _least_prefill(asked: CallToPlace, models: Collection[CostModel], cached_blocks: int) -> _Prefill:
    call = asked.call
    cached_tokens = cached_blocks * call.block_tokens
    if cached_tokens >= call.prompt_tokens:  # the last token is always computed
        cached_tokens = call.cacheable_blocks * call.block_tokens
    missed_tokens = call.prompt_tokens - cached_tokens
    own_s = added_s = later = inf
    for costs in models:
        prefill_s, attention_s = costs.added_s(missed_tokens, cached_tokens)
        own_s = min(own_s, costs.prompts.at(missed_tokens) / costs.efficiency + attention_s)
        added_s = min(added_s, prefill_s)
        later = min(later, FIRST_TOKEN_WEIGHT * LATER * asked.rate * costs.tokens_per_s * prefill_s)
    return _Prefill(FIRST_TOKEN_WEIGHT * own_s, own_s / 2, added_s, later)


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
