"""Finds the blocks that one engine has resident in the prefix tree, by their hashes, while a report is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.policy.prefix.node import Node
from plait.policy.prefix.use_order import UseOrder


class BlockFinder:
    """`ends` has the last resident block of each of the engine's nodes. A report usually names only those.

    At the first other block, all of the engine's blocks are indexed. So a report costs at most O(its blocks + the
    engine's), and no index of all blocks takes memory between reports.
    """

    def __init__(self, engine_id: str, ends: Mapping[int, Node], order: UseOrder) -> None:
        self._engine_id = engine_id
        self._ends = ends
        self._order = order
        self._nodes: dict[int, Node] | None = None

    def find(self, block: int) -> tuple[Node, int] | None:
        """The node of a resident block, and the block's position in it; None if it is not resident."""
        node = self._ends.get(block)
        if node is not None:
            return node, node.holdings[self._engine_id].resident_blocks - 1
        node = self._index().get(block)
        while node is not None:
            holding = node.holdings.get(self._engine_id)
            resident = node.hashes[: holding.resident_blocks] if holding is not None else ()
            if block in resident:
                return node, resident.index(block)
            node = node.parent  # a split since then may have moved the block to an ancestor
        return None

    def stored(self, hashes: Sequence[int], node: Node) -> None:
        """Blocks are resident from now on, in `node` and its ancestors."""
        if self._nodes is not None:
            self._nodes.update(dict.fromkeys(hashes, node))

    def _index(self) -> Mapping[int, Node]:
        if self._nodes is None:
            self._nodes = {
                block: holding.node
                for holding in self._order
                for block in holding.node.hashes[: holding.resident_blocks]
            }
        return self._nodes
