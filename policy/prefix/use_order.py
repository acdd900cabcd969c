"""An engine's order of use over the prefix tree: its holdings, least recently used first."""

from __future__ import annotations

from collections.abc import Iterator

from plait.policy.prefix.node import Holding, Node


class UseOrder:
    """An engine's holdings as a ring through a sentinel, least recently used first. Each step is O(1)."""

    def __init__(self, engine_id: str, sentinel_node: Node) -> None:
        self._engine_id = engine_id
        self._ring = Holding(sentinel_node)
        self._ring.older = self._ring.newer = self._ring

    def __iter__(self) -> Iterator[Holding]:
        """Least recently used first. The current holding may be unlinked during the loop."""
        holding = self._ring.newer
        while holding is not None and holding is not self._ring:
            following = holding.newer
            yield holding
            holding = following

    def touch(self, holding: Holding) -> None:
        """Make `holding` the most recently used."""
        holding.unlink()
        assert self._ring.older is not None
        holding.link_between(self._ring.older, self._ring)

    def touch_path(self, leaf: Node) -> None:
        """Make the engine's holdings on the path to `leaf` the most recently used, ancestors last."""
        for node in leaf.path():
            holding = node.holdings.get(self._engine_id)
            if holding is not None and holding.held:
                self.touch(holding)
