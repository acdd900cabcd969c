"""Residency: which prefixes one engine holds, by its own reports (docs/design/residency.md).

The engine reports the blocks that its cache stored and removed. Between reports, the prefixes of booked calls are
expected. Nodes are kept in the order of their last use, descendants before ancestors. An LRU cache of reference-counted
blocks evicts them in this order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from plait.policy.prefix.node import Node
from plait.policy.prefix.prefix_tree import PrefixTree, Segment
from plait.policy.prefix.resident_blocks import ResidentBlocks
from plait.policy.prefix.use_order import UseOrder

Victim = tuple[Node, int]
"""A node, and how many of its last resident blocks are evicted."""


class Residency:
    """One engine's part of the shared prefix tree: its `resident` blocks, and the blocks of booked calls."""

    def __init__(self, engine_id: str, tree: PrefixTree) -> None:
        self.engine_id = engine_id
        self._tree = tree
        self._order = UseOrder(engine_id, tree.root)
        self.resident = ResidentBlocks(engine_id, tree, self._order)

    def held_blocks(self, path: Sequence[Segment]) -> int:
        """The length of the longest run of blocks from the root of `path` that is resident or expected here."""
        total = 0
        for segment in path:
            held = min(segment.blocks, segment.node.held_blocks(self.engine_id))
            total += held
            if held < segment.blocks:
                break
        return total

    def book(self, leaf: Node, *, waits: bool = False) -> None:
        """A call that ends at `leaf` was booked here. Its blocks are expected, and it counts as a sharer within H.

        If it `waits`, it was not sent yet; `send` follows.
        """
        for node in leaf.path():
            holding = node.holding(self.engine_id)
            holding.bookings += 1
            holding.sharers += 1
            holding.waiting += waits
            self._order.touch(holding)

    def send(self, leaf: Node) -> None:
        """A call does not wait any more: the engine will compute its blocks."""
        for node in leaf.path():
            node.holdings[self.engine_id].waiting -= 1

    def ready_blocks(self, leaf: Node) -> int:
        """The length of the longest run of blocks from the root to `leaf` that is here, or that sent calls compute.

        A call has to be booked at `leaf`.
        """
        total, node, engine_id = 0, leaf, self.engine_id
        while node.parent is not None:  # many waiting calls are asked about for each that is sent
            holding, blocks = node.holdings[engine_id], len(node.hashes)
            staying = holding.resident_blocks - holding.leaving_blocks
            total = total + blocks if holding.bookings > holding.waiting or staying == blocks else staying
            node = node.parent
        return total

    def touch(self, leaf: Node) -> None:
        """The prefix that ends at `leaf` was in use until now."""
        self._order.touch_path(leaf)

    def unbook(self, leaf: Node, *, waits: bool = False) -> None:
        """The call's blocks are no longer expected. Only its resident blocks stay. One that `waits` was not sent."""
        for node in leaf.path():
            holding = node.holdings[self.engine_id]
            holding.bookings -= 1
            holding.waiting -= waits
            if not holding.bookings:
                self._order.unbooked(holding)
            node.drop_unused(self.engine_id)
        self._tree.prune(leaf)

    def unshare(self, leaf: Node) -> None:
        """The call left the window H."""
        for node in leaf.path():
            node.holdings[self.engine_id].sharers -= 1
            node.drop_unused(self.engine_id)
        self._tree.prune(leaf)

    def victims(self, blocks: int, keep: Collection[Node] = ()) -> Iterator[Victim]:
        """The victims that LRU would evict next to free `blocks`. Booked nodes and nodes in `keep` stay."""
        for holding in self._order.free():
            if blocks <= 0:
                return
            if holding.node in keep:
                continue
            taken = min(blocks, holding.staying_blocks)
            blocks -= taken
            yield holding.node, taken

    def expect_eviction(self, blocks: int) -> list[Victim]:
        """A booked call needs `blocks` more than are free. The blocks that LRU evicts then no longer count as held."""
        victims = [victim for victim in self.victims(blocks) if victim[1]]
        for node, taken in victims:
            node.holdings[self.engine_id].leaving_blocks += taken
        return victims

    def end_expectation(self, victims: Sequence[Victim]) -> None:
        """The call's prompt is computed, or the call has ended. `victims` that were not evicted count as held again."""
        for victim, taken in victims:
            rest = taken
            for node in victim.path():  # a split since then moved part of the node to an ancestor
                holding = node.holdings.get(self.engine_id)
                spared = min(rest, holding.leaving_blocks) if holding is not None else 0
                if holding is not None:
                    holding.leaving_blocks -= spared
                rest -= spared
                if rest == 0:
                    break

    def evict(self, blocks: int) -> None:
        """Assume that `blocks` were evicted in LRU order; for engines that do not report."""
        for node, taken in self.victims(blocks):
            self.resident.evict(node, taken)

    def check(self) -> None:
        """Assert that the total and the order of use agree with the tree, and that no prefix has a gap; for tests."""
        nodes = [node for node in self._tree.nodes() if self.engine_id in node.holdings]
        assert len(self.resident) == sum(self.resident.of(node) for node in nodes)
        ordered = list(self._order)
        free = list(self._order.free())
        assert not any(holding.bookings for holding in free)
        assert all(one.used <= next_one.used for one, next_one in pairwise(free))
        position = {holding.node: place for place, holding in enumerate(ordered)}
        assert position.keys() == {node for node in nodes if node.holdings[self.engine_id].held}
        assert all(holding is holding.node.holdings[self.engine_id] for holding in ordered)
        for node, place in position.items():
            parent = node.parent
            assert parent is not None
            if parent is not self._tree.root:
                assert position[parent] > place, "an ancestor would be evicted first"
                assert not self.resident.of(node) or self.resident.of(parent) == len(parent), (
                    "a gap before a resident node"
                )
