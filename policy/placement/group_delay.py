"""Where a call of a task group goes: all calls of the group that still have to be placed are divided among engines.

The calls of a group come together, and share a prefix. By its own delay alone, each call goes where the prefix is until
one more call there costs more than computing the prefix elsewhere. So the first calls crowd one engine. Here, one more
engine computes the prefix if that makes the sum of the delays of all these calls clearly less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.policy.placement.delay import Asked, Offer, joined_cost

WORTH = 0.9
"""An engine is added if that makes the sum at least a tenth less: lengths of answers are guesses, a prefill is not."""

LEAST_GROWTH = 1e-6
"""A call that costs no more than the one before it is taken to cost this part of its delay more."""


@dataclass(frozen=True, slots=True)
class Place:
    """What an engine costs the calls of a group that go there.

    Computing the shared prefix costs `opening_s`. Besides, the first call costs `first_s`. Each further one costs
    `growth_s` more than the one before it.
    """

    offer: Offer
    opening_s: float
    first_s: float
    growth_s: float


def best_for_group(asked: Asked, siblings: int, offers: Sequence[Offer]) -> Offer:
    """The offer that the call takes if it and so many more like it are divided best.

    Of the engines that are used, the call goes where it costs least once the prefix is there.
    """
    shared_blocks = max(one.held_blocks for one in offers)
    places = [_place(asked, one, shared_blocks) for one in sorted(offers, key=lambda one: one.rank)]
    return min(used(places, siblings + 1), key=lambda one: one.first_s).offer


def used(places: Sequence[Place], calls: int) -> Sequence[Place]:
    """The first of `places` that are worth using for so many calls."""
    count, least_s = 1, least_sum_s(places[:1], calls)
    for more in range(2, len(places) + 1):
        sum_s = least_sum_s(places[:more], calls)
        if sum_s <= WORTH * least_s:
            count, least_s = more, sum_s
    return places[:count]


def least_sum_s(places: Sequence[Place], calls: float) -> float:
    """The least sum of delays of so many calls in `places`, each of which computes the prefix.

    Parts of calls may be divided. So one more call would cost the same, `level_s`, in each place that gets some.
    """
    filled = sorted(places, key=lambda one: one.first_s)
    while True:
        level_s = (calls + sum(one.first_s / one.growth_s for one in filled)) / sum(1 / one.growth_s for one in filled)
        if level_s >= filled[-1].first_s:
            break
        filled.pop()
    delays_s = sum((level_s**2 - one.first_s**2) / (2 * one.growth_s) for one in filled)
    return delays_s + sum(one.opening_s for one in places)


def _place(asked: Asked, offer: Offer, shared_blocks: int) -> Place:
    """An engine's place for calls that share the first `shared_blocks` of their prompts."""
    own_s = offer.cost.total_s
    second_s, third_s = (joined_cost(asked, offer, shared_blocks, others).total_s for others in (1, 2))
    growth_s = max(third_s - second_s, LEAST_GROWTH * own_s)
    first_s = min(own_s, second_s - growth_s)
    return Place(offer, own_s - first_s, first_s, growth_s)
