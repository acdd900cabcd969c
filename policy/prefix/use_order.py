"""An engine's order of use over the prefix tree: its holdings, least recently used first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from plait.policy.prefix.node import Holding, Node


class UseOrder:
    """An engine's holdings, in two rings through a sentinel each, least recently used first.

    What calls have booked is in a ring of its own: it is not evicted, and many calls may wait. Each step is O(1). Only
    a holding whose last booking has gone passes those that were used after it, one by one.
    """

    def __init__(self, engine_id: str, sentinel_node: Node) -> None:
        self._engine_id = engine_id
        self._free, self._booked = Holding(sentinel_node), Holding(sentinel_node)
        self._uses = count(1)
        for ring in (self._free, self._booked):
            ring.older = ring.newer = ring

    def __iter__(self) -> Iterator[Holding]:
        """The holdings that are not booked, then those that are. The current one may be unlinked during the loop."""
        yield from self.free()
        yield from _around(self._booked)

    def free(self) -> Iterator[Holding]:
        """The holdings that are not booked. The current one may be unlinked during the loop."""
        return _around(self._free)

    def touch(self, holding: Holding) -> None:
        """Make `holding` the most recently used of its ring."""
        holding.unlink()
        holding.used = next(self._uses)
        ring = self._booked if holding.bookings else self._free
        assert ring.older is not None
        holding.link_between(ring.older, ring)

    def unbooked(self, holding: Holding) -> None:
        """The last booking of `holding` has gone. It was used when it was last touched."""
        holding.unlink()
        newer, older = self._free, self._free.older
        while older is not None and older.used > holding.used:
            newer, older = older, older.older
        assert older is not None
        holding.link_between(older, newer)

    def touch_path(self, leaf: Node) -> None:
        """Make the engine's holdings on the path to `leaf` the most recently used, ancestors last."""
        for node in leaf.path():
            holding = node.holdings.get(self._engine_id)
            if holding is not None and holding.held:
                self.touch(holding)


def _around(ring: Holding) -> Iterator[Holding]:
    holding = ring.newer
    while holding is not None and holding is not ring:
        following = holding.newer
        yield holding
        holding = following
