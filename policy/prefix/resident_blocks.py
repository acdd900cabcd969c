"""The blocks that one engine has stored, by its reports, in the shared prefix tree."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from plait.policy.prefix.prefix_tree import Holding, Node, PrefixTree
from plait.policy.prefix.use_order import UseOrder

Run = tuple[int | None, Sequence[int]]
"""(hash of the block before the run, None at the root; hashes of the run's blocks)."""


class ResidentBlocks:
    """Updates one engine's `Holding.resident_blocks`, their sum `blocks`, and the engine's order of use."""

    def __init__(self, engine_id: str, tree: PrefixTree, order: UseOrder) -> None:
        self._engine_id = engine_id
        self._tree = tree
        self._order = order
        self._ends = tree.ends[engine_id]
        self.blocks = 0

    def of(self, node: Node) -> int:
        """How many leading blocks of a node are resident."""
        holding = node.holding_of(self._engine_id)
        return 0 if holding is None else holding.resident_blocks

    def apply(self, removed: Iterable[int], stored: Iterable[Run], left: set[int] | None = None) -> list[Node]:
        """Apply a report: the engine evicted blocks, then stored runs of blocks. Raises ValueError as `store` does.

        Returns the nodes at which the runs end. Blocks that are no longer resident are added to `left`.
        """
        finder = self.finder()
        self._remove(dict.fromkeys(removed), finder, set() if left is None else left)
        ends = [self._store(parent, hashes, finder) for parent, hashes in stored]
        return [node for node in ends if node is not None]

    def finder(self) -> BlockFinder:
        """For one report."""
        return BlockFinder(self._engine_id, self._ends, self._order)

    def cover(self, other: ResidentBlocks, ends: Iterable[Node]) -> None:
        """Copy what is resident in another tier of the engine, along the prefixes that end with these nodes."""
        for end in ends:
            for node in end.path():
                blocks = other.of(node)
                if self.of(node) >= blocks:
                    break
                self._grow(node, blocks)
            self._order.touch_path(end)

    def store(self, parent: int | None, hashes: Sequence[int]) -> None:
        """The engine stored the blocks `hashes`, which follow the block `parent` (None: they begin a chain).

        A run whose parent is not resident is ignored, because no prompt can use it. Raises ValueError for a run in
        which a block follows itself, or that ends where another of the engine's runs ends.
        """
        self.apply((), [(parent, hashes)])

    def remove(self, block: int) -> None:
        """The engine evicted a block. The blocks after it count as evicted too, because no prompt can use them."""
        self.apply([block], ())

    def _store(self, parent: int | None, hashes: Sequence[int], finder: BlockFinder) -> Node | None:
        node, offset = self._tree.root, 0
        if parent is not None:
            found = finder.find(parent)
            if found is None:
                return None
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
        finder.stored(hashes, node)
        self._order.touch_path(node)
        return node

    def _extend(self, node: Node, fresh: Sequence[int]) -> Node:
        once = set(fresh)
        known = (self._ends, *(above.hashes for above in node.path()))
        if len(once) < len(fresh) or not all(map(once.isdisjoint, known)):
            raise _contradiction()
        return self._tree.extend(node, fresh)

    def _remove(self, evicted: Collection[int], finder: BlockFinder, left: set[int]) -> None:
        """Evict blocks, first those that are the ends of runs: then hardly any other has to be looked for."""
        gone: set[int] = set()
        for block in evicted:
            if (node := self._ends.get(block)) is not None:
                self._cut(node, self.of(node) - 1, evicted, gone)
        for block in evicted:
            if block not in gone and (found := finder.find(block)) is not None:
                self._cut(*found, evicted, gone)
        left |= gone

    def _cut(self, node: Node, offset: int, evicted: Collection[int], gone: set[int]) -> None:
        """Evict a node's blocks from `offset` on, those before it that are evicted, too, and all below the node."""
        while offset and node.hashes[offset - 1] in evicted:
            offset -= 1
        for below in reversed(self._below(node)):
            self._shrink(below, 0, gone)
        self._shrink(node, offset, gone)

    def clear(self) -> None:
        """The engine restarted or sends a snapshot: no block is resident until it is reported again."""
        for holding in self._order:
            self._shrink(holding.node, 0)

    def evict(self, node: Node, blocks: int) -> None:
        """The last `blocks` resident blocks of a node were evicted."""
        self._shrink(node, self.of(node) - blocks)

    def _below(self, node: Node) -> list[Node]:
        """The node's descendants with resident blocks, ancestors first."""
        if self.of(node) < len(node):
            return []
        found = [child for child in node.children.values() if self.of(child)]
        for below in found:  # `found` grows during the loop
            found += [child for child in below.children.values() if self.of(child)]
        return found

    def _grow(self, node: Node, blocks: int) -> None:
        if self._ends.get(node.hashes[blocks - 1], node) is not node:
            raise _contradiction()
        holding = node.holding(self._engine_id)
        if blocks > holding.resident_blocks:
            self.keep(holding, blocks)
        if holding.newer is None:
            self._order.use(holding)

    def _shrink(self, node: Node, blocks: int, left: set[int] | None = None) -> None:
        holding = node.holding(self._engine_id)
        if left is not None:
            left.update(node.hashes[blocks : holding.resident_blocks])
        holding.leaving_blocks = max(0, holding.leaving_blocks - (holding.resident_blocks - blocks))
        holding.ends &= (1 << blocks) - 1
        self.keep(holding, blocks)
        node.drop_unused(holding)
        self._tree.prune(node)

    def keep(self, holding: Holding, blocks: int) -> None:
        """Set a node's resident blocks. Raises ValueError if another node's resident blocks end with the same one."""
        node, hashes, before = holding.node, holding.node.hashes, holding.resident_blocks
        if blocks and self._ends.get(hashes[blocks - 1], node) is not node:
            raise _contradiction()
        if before:
            del self._ends[hashes[before - 1]]
        if blocks:
            self._ends[hashes[blocks - 1]] = node
        holding.resident_blocks = blocks
        self.blocks += blocks - before


class BlockFinder:
    """Finds the nodes of resident blocks while one report is applied.

    A report mostly names blocks in `ends`, the last resident block of a node, or blocks right before those. At the
    first other one, all of the engine's blocks are indexed. So a report costs at most O(its blocks + the engine's), and
    the index takes no memory between reports.
    """

    def __init__(self, engine_id: str, ends: Mapping[int, Node], order: UseOrder) -> None:
        self._engine_id = engine_id
        self._ends = ends
        self._order = order
        self._nodes: dict[int, Node] | None = None

    def find(self, block: int) -> tuple[Node, int] | None:
        """(node, position in the node) of a resident block; None if the block is not resident."""
        node = self._ends.get(block)
        if node is not None:
            return node, node.holding(self._engine_id).resident_blocks - 1
        node = self._index().get(block)
        while node is not None:
            holding = node.holding_of(self._engine_id)
            resident = node.hashes[: holding.resident_blocks] if holding is not None else ()
            if block in resident:
                return node, resident.index(block)
            node = node.parent  # a split since may have moved the block to a new ancestor
        return None

    def stored(self, hashes: Sequence[int], node: Node) -> None:
        """Add blocks that were stored in `node` and its ancestors to the index, if there is one."""
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


def _contradiction() -> ValueError:
    return ValueError("the report puts a block after two different ones")
