"""An engine's order of use over the prefix tree: its holdings, least lately used first."""

from __future__ import annotations

from collections.abc import Iterator

from plait.policy.prefix.node import Holding, Node


class UseOrder:
    """An engine's holdings, least lately used first, as a ring through a sentinel; all steps are O(1)."""

    def __init__(self, engine_id: str, sentinel_node: Node) -> None:
        self._engine_id = engine_id
        self._ring = Holding(sentinel_node)
        self._ring.older = self._ring.newer = self._ring

    def __iter__(self) -> Iterator[Holding]:
        """Least lately used first; the current holding may be unlinked meanwhile."""
        holding = self._ring.newer
        while holding is not None and holding is not self._ring:
            following = holding.newer
            yield holding
            holding = following

    def touch(self, holding: Holding) -> None:
        """Make `holding` the most lately used."""
        holding.unlink()
        assert self._ring.older is not None
        holding.link_between(self._ring.older, self._ring)

    def touch_path(self, leaf: Node) -> None:
        """Make the engine's holdings on the path to `leaf` the most lately used, ancestors last."""
        for node in leaf.path():
            holding = node.holdings.get(self._engine_id)
            if holding is not None and holding.held:
                self.touch(holding)
