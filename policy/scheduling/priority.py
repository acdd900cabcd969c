"""Hit-ratio groups: calls with a larger cached share are admitted more often, and no call starves (Preble, 3.3).

A waiting call belongs to group `floor(P x cached share)`. Group g gets picks in proportion to its weight g + 1, by
stride scheduling. A pick advances the group's position by a step, which is inversely proportional to the weight. The
group with the lowest position is picked next. All numbers are integers, so the order is exact and the same everywhere.

The p-th call of group g is picked within `ceil(55 p / (g + 1)) + 55` picks. Proof: a group starts at most one step
(the time of 55 / (g + 1) picks) ahead of the others. It reaches its p-th pick after p - 1 more steps. Until then every
other group gets at most its proportion, and one pick for rounding. In all, these are fewer than `55 p / (g + 1) + 10`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from math import lcm
from typing import TypeVar

T = TypeVar("T")

GROUPS = 10
"""P, from Preble's section 3.3."""


class HitRatioGroups:
    """The groups' positions. `turns` looks ahead and changes nothing. `charge` makes a pick count."""

    def __init__(self, groups: int = GROUPS) -> None:
        self._groups = groups
        scale = lcm(*range(1, groups + 1))
        self._steps = [scale // (group + 1) for group in range(groups)]
        self._positions = [0] * groups
        self._reached = 0
        """The position of the latest pick. An idle group starts again from here, so it does not save up turns."""

    def group(self, cached_tokens: int, tokens: int) -> int:
        """The group of a call that has `cached_tokens` of its `tokens` in the cache."""
        groups = self._groups
        return groups * cached_tokens // tokens if cached_tokens < tokens else groups - 1

    def turns(self, queues: Sequence[Collection[T]]) -> Iterator[tuple[int, T]]:
        """(group, call) in the order of picks. `queues` has one queue of waiting calls for each group, by group."""
        # Ties: the group with the larger cached share goes first.
        standing = [(max(self._positions[group], self._reached), -group) for group, queue in enumerate(queues) if queue]
        heapify(standing)
        rests = [iter(queue) for queue in queues]
        while standing:
            position, negative = standing[0]
            call = next(rests[-negative], None)
            if call is None:
                heappop(standing)
                continue
            yield -negative, call
            heapreplace(standing, (position + self._steps[-negative], negative))

    def charge(self, group: int) -> None:
        """A call of the group was admitted. Charge the calls in the order of `turns`."""
        self._reached = max(self._positions[group], self._reached)
        self._positions[group] = self._reached + self._steps[group]
