"""The order in which one engine's blocks were last used: the next victims of LRU come first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from plait.policy.prefix.prefix_tree import Holding, Node


class UseOrder:
    """An engine's holdings in two linked rings, each with a sentinel, least recently used first.

    Booked holdings have a ring of their own, because they are never victims and may be many. Each operation is O(1),
    except `unbooked`: the holding moves back past each holding that was used after it.
    """

    def __init__(self, engine_id: str, sentinel_node: Node) -> None:
        self._engine_id = engine_id
        self._free, self._booked = Holding(sentinel_node, engine_id), Holding(sentinel_node, engine_id)
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

    def use(self, holding: Holding) -> None:
        """Make `holding` the most recently used of its ring. It may come from the other ring, or from none."""
        older, newer = holding.older, holding.newer
        if older is not None and newer is not None:
            older.newer, newer.older = newer, older
        ring = self._booked if holding.bookings else self._free
        latest = ring.older
        assert latest is not None
        holding.used, holding.older, holding.newer = next(self._uses), latest, ring
        latest.newer = ring.older = holding

    def touch_path(self, leaf: Node) -> None:
        """Make the engine's holdings on the path to `leaf` the most recently used of their rings, the root's last."""
        node, engine_id = leaf, self._engine_id
        while (parent := node.parent) is not None:
            holding = node.first
            if holding is None or holding.engine_id != engine_id:
                holding = node.others.get(engine_id)
            if holding is not None and (holding.bookings or holding.resident_blocks):
                self.use(holding)
            node = parent

    def unbooked(self, holding: Holding) -> None:
        """The last booking of `holding` has ended: moves it to the free ring, to the place of its last use."""
        older, newer = holding.older, holding.newer
        if older is not None and newer is not None:
            older.newer, newer.older = newer, older
        newer, older = self._free, self._free.older
        while older is not None and older.used > holding.used:
            newer, older = older, older.older
        assert older is not None
        holding.older, holding.newer = older, newer
        older.newer = newer.older = holding


def _around(ring: Holding) -> Iterator[Holding]:
    holding = ring.newer
    while holding is not None and holding is not ring:
        following = holding.newer
        yield holding
        holding = following
