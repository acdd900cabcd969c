"""The policy `plait`: a call goes to the engine where it delays itself and all others least.

In a large fleet, few engines are looked at: those whose floor is below the best offer so far (branch and bound). The
outcome is that of looking at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, nsmallest
from math import inf
from operator import attrgetter
from typing import Final

from plait.policy.placement.copies import Copy, longest
from plait.policy.placement.delay import Asked, Offer, Rank, offer
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.floors import floors
from plait.policy.placement.group_delay import best_for_group
from plait.policy.placement.situation import Situation, placed
from plait.policy.types import Call, Placement, PlacementReason

FEW: Final = 4
"""So many engines are looked at one by one: that takes less time than to compute their floors first. With 8 engines,
floors take half the time (`python -m benchmarks placement`).
"""

MOST_FOR_GROUP: Final = 16
"""So many engines are looked at for a call of a task group. The next call of the group may find others."""

ROUNDING: Final = 1e-9

_rank: Final[Callable[[Offer], Rank]] = attrgetter("rank")


def least_delay(call: Call, situation: Situation) -> Placement:
    """The engine with the least delay. Ties: in turn.

    A call with a TTFT goes to an engine that is expected to meet it. If none is, the call goes
    where its first token is expected first. A call of a task group without a TTFT goes where that is best for the
    whole group.
    """
    asked = Asked.of(call, situation)
    first = situation.turn % len(situation.engines)
    engines = [*situation.engines[first:], *situation.engines[:first]]
    if situation.siblings and asked.ttft_s == inf:
        best = best_for_group(asked, situation.siblings, _offers(asked, situation, engines))
    else:
        few = len(engines) <= FEW
        best = min(all_offers(asked, situation, engines), key=_rank) if few else best_of_many(asked, situation, engines)
    exploits = 2 * best.held_blocks * call.block_tokens > call.prompt_tokens
    reason = PlacementReason.EXPLOIT if exploits else PlacementReason.EXPLORE
    meets_ttft = None if asked.ttft_s == inf else best.rank[0] <= 0
    return placed(call, best.engine, reason, best.held_blocks, best.cost, meets_ttft=meets_ttft)


def all_offers(asked: Asked, situation: Situation, engines: Sequence[EngineView]) -> list[Offer]:
    """What each engine offers, with what a copy of the prompt's longest cached part would repay."""
    offers = list(map(partial(offer, asked, situation), engines))
    found = longest(asked, situation, engines, offers) if len(engines) > 1 else None
    if found is None:
        return offers
    copy = Copy.of(situation, found, min((offers[place] for place in sorted(found.holders)), key=_rank))
    return [one if place in found.holders else copy.on(asked, situation, one) for place, one in enumerate(offers)]


def best_of_many(asked: Asked, situation: Situation, engines: Sequence[EngineView]) -> Offer:
    """The first of the best of `all_offers`, without looking at every engine.

    An offer that misses the TTFT is compared with all.
    """
    search, found = _Search(asked, situation, engines), longest(asked, situation, engines)
    if found is None:
        return search.over(zip(floors(asked, situation, engines).costs_s, range(len(engines)), strict=True))
    least = floors(asked, situation, engines, found.blocks)
    copy = Copy.of(situation, found, search.over((least.costs_s[place], place) for place in found.holders))
    search.copy = copy
    least_s = copy.least_with(*least)
    for place in found.holders:
        least_s[place] = inf  # looked at before
    return search.over(zip(least_s, range(len(engines)), strict=True))


@dataclass(slots=True)
class _Search:
    """A branch and bound. `best` is the best offer so far and its place. `copy` is what the others would make."""

    asked: Asked
    situation: Situation
    engines: Sequence[EngineView]
    best: tuple[int, Offer] | None = None
    copy: Copy | None = None

    def over(self, least: Iterable[tuple[float, int]]) -> Offer:
        """The best offer so far or of these engines, each given as the least cost in seconds and the place.

        An engine whose least cost is infinite is left out.
        """
        heap = list(least)
        heapify(heap)
        best = self.best
        while heap:
            floor_s, place = heappop(heap)
            if best is not None and best[1].rank[0] == 0.0 and floor_s >= _rounded(best[1].rank[1]):
                break
            if floor_s == inf:
                break
            found = offer(self.asked, self.situation, self.engines[place])
            if self.copy is not None:
                found = self.copy.on(self.asked, self.situation, found)
            if best is None or (found.rank, place) < (best[1].rank, best[0]):
                best = place, found
        assert best is not None
        self.best = best
        return best[1]


def _offers(asked: Asked, situation: Situation, engines: Sequence[EngineView]) -> list[Offer]:
    """The offers of all engines; in a large fleet, of those with the lowest floors."""
    if len(engines) > MOST_FOR_GROUP:
        least = floors(asked, situation, engines).costs_s
        engines = [engines[place] for place in nsmallest(MOST_FOR_GROUP, range(len(engines)), least.__getitem__)]
    return [offer(asked, situation, engine) for engine in engines]


def _rounded(seconds: float) -> float:
    """A little less: a floor and a cost that are equal may differ by the order in which they were added up."""
    return seconds - ROUNDING * abs(seconds)
