"""Residency: which prefixes one engine holds, as knowledge, not hope (DESIGN 4.1).

The engine reports what its cache stored and removed; between reports, the prefixes of booked calls are expected. Nodes
are kept in the order of their last use with descendants before ancestors, which is the order in which an LRU cache of
reference-counted blocks gives them up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from plait.policy.prefix.node import Node
from plait.policy.prefix.prefix_tree import PrefixTree, Segment
from plait.policy.prefix.use_order import UseOrder

Victim = tuple[Node, int]
"""A node, and how many blocks from its resident end go."""


class Residency:
    """What one engine holds of the shared prefix tree."""

    def __init__(self, engine_id: str, tree: PrefixTree) -> None:
        self.engine_id = engine_id
        self.resident_blocks = 0
        self._tree = tree
        self._order = UseOrder(tree.root)

    def held_blocks(self, path: Sequence[Segment]) -> int:
        """The longest run of blocks from the root of `path` that is resident or booked here."""
        total = 0
        for segment in path:
            held = min(segment.blocks, segment.node.held_blocks(self.engine_id))
            total += held
            if held < segment.blocks:
                break
        return total

    def book(self, leaf: Node) -> None:
        """A call that ends at `leaf` was placed here: its blocks are expected, and it shares them within H."""
        for node in leaf.path():
            holding = node.holding(self.engine_id)
            holding.bookings += 1
            holding.sharers += 1
            self._order.touch(holding)

    def touch(self, leaf: Node) -> None:
        """The prefix that ends at `leaf` was in use until now."""
        for node in leaf.path():
            holding = node.holdings.get(self.engine_id)
            if holding is not None and holding.held:
                self._order.touch(holding)

    def unbook(self, leaf: Node) -> None:
        """The call's blocks are no longer expected: what stays is what the engine reported."""
        for node in leaf.path():
            node.holdings[self.engine_id].bookings -= 1
            node.drop_unused(self.engine_id)
        self._tree.prune(leaf)

    def unshare(self, leaf: Node) -> None:
        """The call left the window H."""
        for node in leaf.path():
            node.holdings[self.engine_id].sharers -= 1
            node.drop_unused(self.engine_id)
        self._tree.prune(leaf)

    def store(self, parent: int | None, hashes: Sequence[int]) -> None:
        """The engine stored the blocks `hashes`, which continue the chain at `parent` (None: they begin one).

        A run whose parent is not resident here cannot be reached from the root and is left out.
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
                behind = node.children.get(hashes[position]) or self._tree.extend(node, hashes[position:])
                node, offset = behind, offset if behind is node else 0
            common = node.common_blocks(offset, hashes, position)
            if common == 0:  # the run leaves the node here
                node = self._tree.split(node, offset)
            offset += common
            position += common
            self._grow(node, offset)
        self.touch(node)

    def store_path(self, leaf: Node) -> None:
        """Everything up to `leaf` is taken to be stored: for engines that do not report."""
        for node in leaf.path():
            self._grow(node, len(node))
        self.touch(leaf)

    def remove(self, block: int) -> None:
        """The engine evicted a block: what lay behind it can no longer be reached from the root and goes with it."""
        found = self._find(block)
        if found is None:
            return
        node, offset = found
        for below in reversed(self._resident_below(node)):
            self._shrink(below, 0)
        self._shrink(node, offset)

    def clear(self) -> None:
        """The engine restarted or is about to send a snapshot: nothing is resident until it says so."""
        for holding in self._order:
            self._shrink(holding.node, 0)

    def victims(self, blocks: int, keep: Collection[Node] = ()) -> Iterator[Victim]:
        """The (node, tail blocks) that LRU would evict next to free `blocks`; booked nodes and those in `keep` stay."""
        for holding in self._order:
            if blocks <= 0:
                return
            if holding.bookings or holding.node in keep:
                continue
            taken = min(blocks, holding.staying_blocks)
            blocks -= taken
            yield holding.node, taken

    def expect_eviction(self, blocks: int) -> list[Victim]:
        """A call on its way will need `blocks` of room: what LRU evicts for it no longer counts as held."""
        victims = [victim for victim in self.victims(blocks) if victim[1]]
        for node, taken in victims:
            node.holdings[self.engine_id].leaving_blocks += taken
        return victims

    def end_expectation(self, victims: Sequence[Victim]) -> None:
        """The call has found its room or given up: what it did not push out of `victims` stays after all."""
        for victim, taken in victims:
            rest = taken
            for node in victim.path():  # a node that was split since has left part of it to its ancestors
                holding = node.holdings.get(self.engine_id)
                spared = min(rest, holding.leaving_blocks) if holding is not None else 0
                if holding is not None:
                    holding.leaving_blocks -= spared
                rest -= spared
                if rest == 0:
                    break

    def evict(self, blocks: int) -> None:
        """Take `blocks` to be evicted in LRU order: for engines that do not report."""
        for node, taken in self.victims(blocks):
            self._shrink(node, self._resident(node) - taken)

    def check(self) -> None:
        """Assert that total and order of use agree with the tree and that there are no gaps; for tests."""
        nodes = [node for node in set(self._tree.index.values()) if self.engine_id in node.holdings]
        assert self.resident_blocks == sum(self._resident(node) for node in nodes)
        ordered = list(self._order)
        position = {holding.node: place for place, holding in enumerate(ordered)}
        assert position.keys() == {node for node in nodes if node.holdings[self.engine_id].held}
        assert all(holding is holding.node.holdings[self.engine_id] for holding in ordered)
        for node, place in position.items():
            parent = node.parent
            assert parent is not None
            if parent is not self._tree.root:
                assert position[parent] > place, "an ancestor would be evicted first"
                assert not self._resident(node) or self._resident(parent) == len(parent), "a gap before a resident node"

    def _resident(self, node: Node) -> int:
        holding = node.holdings.get(self.engine_id)
        return 0 if holding is None else holding.resident_blocks

    def _find(self, block: int) -> tuple[Node, int] | None:
        """The node of a block that is resident here, and the block's place in it."""
        node = self._tree.index.get(block)
        resident = 0 if node is None else self._resident(node)
        if node is None or resident == 0:
            return None
        if node.hashes[resident - 1] == block:  # the usual case: reports continue or take away the end
            return node, resident - 1
        try:
            return node, node.hashes.index(block, 0, resident)
        except ValueError:
            return None

    def _resident_below(self, node: Node) -> list[Node]:
        """The node's descendants of which something is resident here, ancestors first."""
        if self._resident(node) < len(node):
            return []
        found = [child for child in node.children.values() if self._resident(child)]
        for below in found:  # grows while it is walked
            found += [child for child in below.children.values() if self._resident(child)]
        return found

    def _grow(self, node: Node, blocks: int) -> None:
        holding = node.holding(self.engine_id)
        self.resident_blocks += max(0, blocks - holding.resident_blocks)
        holding.resident_blocks = max(blocks, holding.resident_blocks)
        if holding.newer is None:
            self._order.touch(holding)

    def _shrink(self, node: Node, blocks: int) -> None:
        holding = node.holdings[self.engine_id]
        evicted = holding.resident_blocks - blocks
        self.resident_blocks -= evicted
        holding.resident_blocks = blocks
        holding.leaving_blocks = max(0, holding.leaving_blocks - evicted)
        node.drop_unused(self.engine_id)
        self._tree.prune(node)
