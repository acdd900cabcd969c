"""The blocks of the prefix tree that one engine has cached: reported, or assumed if the engine does not report."""

from __future__ import annotations

from collections.abc import Sequence

from plait.policy.prefix.node import Node
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.use_order import UseOrder


class ResidentBlocks:
    """Updates one engine's `Holding.resident_blocks`, their sum (`len`), and the engine's order of use."""

    def __init__(self, engine_id: str, tree: PrefixTree, order: UseOrder) -> None:
        self._engine_id = engine_id
        self._tree = tree
        self._order = order
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def of(self, node: Node) -> int:
        """How many leading blocks of a node are resident."""
        holding = node.holdings.get(self._engine_id)
        return 0 if holding is None else holding.resident_blocks

    def store(self, parent: int | None, hashes: Sequence[int]) -> None:
        """The engine stored the blocks `hashes`, which follow the block `parent` (None: they begin a chain).

        A run whose parent is not resident here cannot be reached from the root. It is ignored. Raises ValueError for a
        run that contradicts the tree: a block follows two others, or itself.
        """
        node, offset = self._tree.root, 0
        if parent is not None:
            found = self._find(parent)
            if found is None:
                return
            node, offset = found[0], found[1] + 1
        position = 0
        while position < len(hashes):
            if offset == len(node):
                behind = node.children.get(hashes[position]) or self._extend(node, hashes[position:])
                node, offset = behind, offset if behind is node else 0
            common = node.common_blocks(offset, hashes, position)
            if common == 0:  # the run leaves the node here
                node = self._tree.split(node, offset)
            offset += common
            position += common
            self._grow(node, offset)
        self._order.touch_path(node)

    def _extend(self, node: Node, fresh: Sequence[int]) -> Node:
        """Put new blocks after `node`. A block's hash stands for all before it, so it has one place in the tree."""
        if not self._tree.index.keys().isdisjoint(fresh) or len(set(fresh)) < len(fresh):
            raise ValueError("the report puts a block after two different ones")
        return self._tree.extend(node, fresh)

    def store_path(self, leaf: Node) -> None:
        """Assume that all blocks up to the end of `leaf` were stored; for engines that do not report."""
        for node in leaf.path():
            self._grow(node, len(node))
        self._order.touch_path(leaf)

    def remove(self, block: int) -> None:
        """The engine evicted a block. The blocks after it go too: they can no longer be reached from the root."""
        found = self._find(block)
        if found is None:
            return
        node, offset = found
        for below in reversed(self._below(node)):
            self._shrink(below, 0)
        self._shrink(node, offset)

    def clear(self) -> None:
        """The engine restarted or sends a snapshot: no block is resident until it is reported again."""
        for holding in self._order:
            self._shrink(holding.node, 0)

    def evict(self, node: Node, blocks: int) -> None:
        """The last `blocks` resident blocks of a node were evicted."""
        self._shrink(node, self.of(node) - blocks)

    def _find(self, block: int) -> tuple[Node, int] | None:
        """The node of a block that is resident here, and the block's position in it; None if it is not resident."""
        node = self._tree.index.get(block)
        resident = 0 if node is None else self.of(node)
        if node is None or resident == 0:
            return None
        if node.hashes[resident - 1] == block:  # the usual case: a report extends or removes the end
            return node, resident - 1
        try:
            return node, node.hashes.index(block, 0, resident)
        except ValueError:
            return None

    def _below(self, node: Node) -> list[Node]:
        """The node's descendants with resident blocks, ancestors first."""
        if self.of(node) < len(node):
            return []
        found = [child for child in node.children.values() if self.of(child)]
        for below in found:  # `found` grows during the loop
            found += [child for child in below.children.values() if self.of(child)]
        return found

    def _grow(self, node: Node, blocks: int) -> None:
        holding = node.holding(self._engine_id)
        self._blocks += max(0, blocks - holding.resident_blocks)
        holding.resident_blocks = max(blocks, holding.resident_blocks)
        if holding.newer is None:
            self._order.touch(holding)

    def _shrink(self, node: Node, blocks: int) -> None:
        holding = node.holdings[self._engine_id]
        evicted = holding.resident_blocks - blocks
        self._blocks -= evicted
        holding.resident_blocks = blocks
        holding.leaving_blocks = max(0, holding.leaving_blocks - evicted)
        node.drop_unused(self._engine_id)
        self._tree.prune(node)
