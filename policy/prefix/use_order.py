"""An engine's order of use over the prefix tree: which of its holdings was used longest ago."""

from __future__ import annotations

from collections.abc import Iterator

from plait.policy.prefix.node import Holding, Node


class UseOrder:
    """An engine's holdings from the least to the most lately used, as a ring through a sentinel; all steps O(1)."""

    def __init__(self, engine_id: str, sentinel_node: Node) -> None:
        self._engine_id = engine_id
        self._ring = Holding(sentinel_node)
        self._ring.older = self._ring.newer = self._ring

    def __iter__(self) -> Iterator[Holding]:
        """Oldest first; the current holding may be unlinked meanwhile."""
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
        """Make what the engine holds of the prefix that ends at `leaf` the most lately used, ancestors last."""
        for node in leaf.path():
            holding = node.holdings.get(self._engine_id)
            if holding is not None and holding.held:
                self.touch(holding)
