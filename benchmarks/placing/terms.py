"""The policy `plait` with one part of its sum left out."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Final

from plait.policy.costs.delay import CallToPlace, DelayCost, offer
from plait.policy.costs.situation import Situation
from plait.policy.placement.least_delay import repay_copies
from plait.policy.placement.policies import Policy
from plait.policy.types import Call, Placement

TERMS: Final = tuple(term.name for term in fields(DelayCost))
"""The parts of the sum."""


def without(term: str) -> Policy:
    """The engine with the least delay, where `term` counts nothing. Ties: in turn."""

    def place(call: Call, situation: Situation) -> Placement:
        asked = CallToPlace.of(call, situation)
        offers = [offer(asked, situation, engine) for engine in situation.engines]
        repay_copies(asked, situation, offers)
        sums = [replace(one.cost, **{term: 0.0}).total_s for one in offers]
        best = [number for number, seconds in enumerate(sums) if seconds == min(sums)]
        chosen = offers[best[situation.turn % len(best)]]
        return asked.placed(chosen.engine, chosen.cached_blocks, chosen.cost)

    return Policy(f"plait without {term}", f"plait without {term}", place)
