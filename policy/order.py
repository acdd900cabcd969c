"""The order of one tenant's calls, wherever they wait: in the gateway's lines and in an engine.

Whose turn it is, of several tenants, is decided before (`admission.fair_shares`). A tenant's own order is the same
whatever others do: by `Rank`, then by priority. No rank waits for ever (`Kept`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import Final

from plait.policy.types import Objective, Slo

KEPT: Final = 0.1
"""The share of the tokens served before it that a rank keeps while it waits."""


ONLINE_S: Final = 60.0
"""Calls for which somebody waits may be followed by others for so long: until then lines of batches leave them room."""


class Rank(IntEnum):
    """The class of a call. A lower one goes first."""

    PROMISED = 0
    """The call has a TTFT or JCT. In an engine with our scheduler, such calls go by what is left of their times."""
    LATENCY = 1
    PLAIN = 2
    THROUGHPUT = 3


def rank_of(slo: Slo | None, objective: Objective | None) -> Rank:
    if slo is not None and slo.has_zero:
        return Rank.PROMISED
    if objective is None:
        return Rank.PLAIN
    return Rank.LATENCY if objective is Objective.LATENCY else Rank.THROUGHPUT


class Kept:
    """What waiting ranks are owed: the lowest goes first, unless another one is owed its next call."""

    __slots__ = ("_owed",)

    def __init__(self) -> None:
        self._owed: dict[Rank, float] = {}

    def first(self, waiting: Mapping[Rank, int]) -> Rank:
        """The rank that goes next. `waiting` has the tokens of each waiting rank's next call."""
        owed = [rank for rank, tokens in waiting.items() if self._owed.get(rank, 0.0) >= tokens]
        return min(owed or waiting)

    def serve(self, served: Rank, tokens: int, waiting: Collection[Rank]) -> None:
        """A call is served while these ranks wait."""
        before, self._owed = self._owed, {}
        for rank in waiting:
            owed = before.get(rank, 0.0)
            if rank > served:
                owed += KEPT * tokens
            elif rank is served:
                owed -= tokens
            if owed > 0.0:
                self._owed[rank] = owed
