"""The needs of a call's consumers, from which the call's own need follows."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Literal

from plait.policy.programs.objectives_stage import Stage
from plait.policy.types import Objective

Need = Stage | Literal[Objective.THROUGHPUT]
"""A call's need: a stage, or throughput."""


class Offers:
    """The needs of one call's consumers, counted once for each link.

    A change takes O(1). Finding the smallest stage takes logarithmic time in the awaited calls, and linear time in the
    distances of one awaited call.
    """

    __slots__ = ("_changed", "_heap", "_links", "_throughput_links")

    def __init__(self) -> None:
        self._links: dict[str, dict[int, int]] = {}  # by awaited call and distance
        self._throughput_links = 0
        self._changed: list[str] = []
        self._heap: list[tuple[int, str]] = []  # (largest distance, awaited call), with outdated entries

    def __bool__(self) -> bool:
        return bool(self._links or self._throughput_links)

    def change(self, need: Need, links: int) -> None:
        """Add `links` links to consumers with this need; a negative number removes them."""
        if not isinstance(need, Stage):
            self._throughput_links += links
            return
        awaited, distance = need
        distances = self._links.get(awaited)
        if distances is None:
            distances = self._links[awaited] = {}
        count = distances.get(distance, 0) + links
        if count:
            distances[distance] = count
        else:
            del distances[distance]
            if not distances:
                del self._links[awaited]
        self._changed.append(awaited)

    def need(self) -> Need | None:
        """The call's need: the smallest stage that its consumers offer, else throughput; None without offers.

        If consumers are in several stages of one awaited call, the largest of these counts.
        """
        for awaited in self._links.keys() & self._changed:
            heappush(self._heap, (max(self._links[awaited]), awaited))
        self._changed.clear()
        if len(self._heap) > 2 * len(self._links) + 8:
            self._heap = [(max(distances), awaited) for awaited, distances in self._links.items()]
            heapify(self._heap)
        while self._heap:
            distance, awaited = self._heap[0]
            if distance == max(self._links.get(awaited, ()), default=None):
                return Stage(awaited, distance + 1)
            heappop(self._heap)
        return Objective.THROUGHPUT if self._throughput_links else None

    def counted(self) -> dict[Need, int]:
        """The number of links for each need; for tests."""
        counted: dict[Need, int] = {
            Stage(awaited, distance): links
            for awaited, distances in self._links.items()
            for distance, links in distances.items()
        }
        return counted | ({Objective.THROUGHPUT: self._throughput_links} if self._throughput_links else {})
