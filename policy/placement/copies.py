"""What a copy of a prefix is worth beyond the call that makes it: the later calls that find it, in seconds.

A call that goes where the prefix is not computes it there. Where a prefix is used often, and by few engines, later
calls will use the copy while engines are as unequal as now. So the copy repays a part of what it costs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

from plait.policy.placement.delay import Asked, Offer, delay_cost
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import Situation, cached_blocks
from plait.policy.prefix.prefix_tree import USES_S

REPAID = 4.0
"""How much longer than one call the engines stay as unequal as now: the copy serves the uses of this time."""


class Longest(NamedTuple):
    """The longest part of a prompt that an engine has: its blocks, and the places of all engines that have it."""

    blocks: int
    holders: Collection[int]


def longest(
    asked: Asked, situation: Situation, engines: Sequence[EngineView], offers: Sequence[Offer] = ()
) -> Longest | None:
    """None if no engine has a part of the prompt, or all have as much. Looks at few engines that have less.

    `offers` are those of all engines, or none.
    """
    held: dict[int, int] = {}
    best = 0
    for segment in reversed(situation.path):
        if best and best >= min(asked.call.cacheable_blocks, segment.node.start_blocks + segment.blocks):
            break
        node = segment.node
        first_id, others = node.first.engine_id if node.first is not None else None, node.others
        for place, engine in enumerate(engines):
            if (engine.engine_id == first_id or engine.engine_id in others) and place not in held:
                blocks = offers[place].held_blocks if offers else cached_blocks(asked.call, situation, engine)
                held[place] = blocks
                best = max(best, blocks)
    holders = [place for place, found in held.items() if found == best]
    return Longest(best, holders) if best and len(holders) < len(engines) else None


class Copy(NamedTuple):
    """A copy of `blocks` of a prompt. It will serve so many `uses`, each of which costs `holder_s` without it."""

    blocks: int
    holder_s: float
    uses: float

    @classmethod
    def of(cls, situation: Situation, found: Longest, best: Offer) -> Self:
        """`best` is the best offer of an engine that has the longest part."""
        node = next(segment.node for segment in situation.path if segment.node.end_blocks >= found.blocks)
        lasts_s = REPAID * (best.cost.first_token_s + best.cost.decode_s)
        uses = node.uses(situation.now_s) / USES_S * lasts_s / (len(found.holders) + 1)
        return cls(found.blocks, best.cost.total_s, uses)

    def repaid_s(self, with_copy_s: float) -> float:
        """What the copy repays on an engine where a call with it costs so much."""
        return self.uses * max(0.0, self.holder_s - with_copy_s)

    def least_with(self, costs_s: Sequence[float], with_copy_s: Sequence[float]) -> list[float]:
        """The floors of engines less what the copy repays there. This calls nothing for each engine."""
        holder_s, uses = self.holder_s, self.uses
        return [
            cost_s - uses * (holder_s - copy_s) if copy_s < holder_s else cost_s
            for cost_s, copy_s in zip(costs_s, with_copy_s, strict=True)
        ]

    def on(self, asked: Asked, situation: Situation, offer: Offer) -> Offer:
        """The offer of an engine that has not this part of the prompt, with what the copy repays."""
        cost = delay_cost(asked, offer.engine, self.blocks, situation.now_s, situation.passed)
        repaid_s = self.repaid_s(cost.total_s)
        if not repaid_s:
            return offer
        cost = offer.cost._replace(repaid_s=repaid_s)
        return offer._replace(rank=(offer.rank[0], cost.total_s), cost=cost)
