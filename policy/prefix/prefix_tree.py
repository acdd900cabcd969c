"""The prefix tree: one radix tree over chained block hashes, shared by all engines and models.

A node is a run of blocks that every prompt through it shares. Because hashes are chained, one hash identifies a whole
prefix. So a match is a bisection over the prompt's hashes, and chains of different models never meet below the root.
Each node has a `Holding` for each engine: the engine's blocks of the node, and the calls that shared it recently. See
docs/design/prefix-tree.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from plait.policy.prefix.node import Node
from plait.policy.prefix.small_mapping import with_entry, without_entry


@dataclass(frozen=True, slots=True)
class Segment:
    """The first `blocks` blocks of a node, matched by a prompt. Only a path's last segment may be part of its node."""

    node: Node
    blocks: int


class PrefixTree:
    """The radix tree. `index` has the node of every block, so one hash finds any prefix.

    `_only_child` has nodes that may be merged with their only child. `_most_blocks` is the most that `tidy` saw since
    the index was made.
    """

    def __init__(self) -> None:
        self.root = Node(None, 0, array("Q"))
        self.index: dict[int, Node] = {}
        self._most_blocks = 0
        self._only_child: dict[Node, None] = {}

    def __len__(self) -> int:
        """Blocks in the tree."""
        return len(self.index)

    def match(self, hashes: Sequence[int]) -> list[Segment]:
        """The path that `hashes` shares with the tree, root first. Changes nothing. O(log blocks + nodes)."""
        index = self.index
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in index:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return []
        last = index[hashes[low - 1]]
        if not 0 < low - last.start_blocks <= len(last):
            return []  # an engine reported a block at another place than prompts have it
        segments = [Segment(node, len(node)) for node in last.path()]
        segments[0] = Segment(last, low - last.start_blocks)
        segments.reverse()
        return segments

    def insert(self, hashes: Sequence[int]) -> Node:
        """Insert a chain that begins at the root. Returns the chain's last node, which ends at the chain's end."""
        node = self.root
        position, length = 0, len(hashes)
        while position < length:
            child = node.children.get(hashes[position])
            if child is None:
                return self.add_leaf(node, hashes[position:])
            common = child.common_blocks(0, hashes, position)
            node = child if common == len(child) else self.split(child, common)
            position += common
        return node

    def add_leaf(self, parent: Node, hashes: Sequence[int]) -> Node:
        """Add the chain `hashes` below `parent`. None of its blocks may be in the tree."""
        leaf = Node(parent, parent.end_blocks, array("Q", hashes))
        blocks = leaf.hashes.tolist()  # made once: both mappings keep the same integers
        parent.children = with_entry(parent.children, blocks[0], leaf)
        for block in blocks:
            self.index[block] = leaf
        return leaf

    def extend(self, node: Node, hashes: Sequence[int]) -> Node:
        """Add `hashes` after `node` and return the node that has them. None of them may be in the tree.

        A leaf that no call spans grows, so that an output reported block by block stays one node. A leaf that calls
        span gets a child, because calls span whole nodes.
        """
        if node.parent is None or node.children or any(h.bookings or h.sharers for h in node.holdings.values()):
            return self.add_leaf(node, hashes)
        node.hashes.extend(hashes)
        for block in hashes:
            self.index[block] = node
        return node

    def split(self, node: Node, blocks: int) -> Node:
        """Cut `node` after its first `blocks` blocks and return the new upper part.

        The lower part stays the same object, because calls that end there refer to it. They span the upper part too.
        """
        assert node.parent is not None
        assert 0 < blocks < len(node)
        upper = Node(node.parent, node.start_blocks, node.hashes[:blocks])
        node.parent.children = with_entry(node.parent.children, upper.hashes[0], upper)
        for block in upper.hashes:
            self.index[block] = upper
        node.hashes = node.hashes[blocks:]
        node.start_blocks += blocks
        node.parent = upper
        upper.children = with_entry(upper.children, node.hashes[0], node)
        for engine_id, holding in list(node.holdings.items()):
            upper.holdings = with_entry(upper.holdings, engine_id, holding.split(upper, blocks))
            node.drop_unused(engine_id)
        return upper

    def prune(self, node: Node) -> int:
        """Drop blocks that no engine needs, from `node` upwards; returns how many nodes left the tree."""
        removed = 0
        while node.parent is not None and not node.children:
            keep = max((h.needed_blocks() for h in node.holdings.values()), default=0)
            for block in node.hashes[keep:]:
                if self.index.get(block) is node:  # an engine may have reported it at a place where no prompt has it
                    del self.index[block]
            if keep:
                del node.hashes[keep:]
                break
            parent = node.parent
            parent.children = without_entry(parent.children, node.hashes[0])
            removed += 1
            node = parent
        self._note_only_child(node)
        return removed

    def tidy(self) -> None:
        """Merge nodes that nothing divides any more, and give unused memory of the index back.

        Called about once a second, and never while nodes are walked: a prefix that is shared again and again is then
        split and merged at most once a second. Each block that moves was moved by a split before.
        """
        nodes, self._only_child = self._only_child, {}
        for node in nodes:
            self._merge(node)
        self._most_blocks = max(self._most_blocks, len(self.index))
        if 2 * len(self.index) < self._most_blocks:
            self.index = dict(self.index)  # a dict from which keys are deleted keeps its size; its copy does not
            self._most_blocks = len(self.index)

    def _note_only_child(self, node: Node) -> None:
        """A child of `node` left the tree, or a call that spanned it ended. Look at it again in `tidy`."""
        if not node.children and node.parent is not None:
            node = node.parent
        if len(node.children) == 1 and node.parent is not None:
            self._only_child[node] = None

    def _merge(self, upper: Node) -> None:
        """Merge a node into its only child, if both are still in the tree and nothing divides them.

        The lower part stays the same object, as when a node is split.
        """
        parent = upper.parent
        assert parent is not None
        if parent.children.get(upper.hashes[0]) is not upper or len(upper.children) != 1:
            return
        (lower,) = upper.children.values()
        if not upper.can_join(lower):
            return
        for engine_id, holding in upper.holdings.items():
            lower.holding(engine_id).join(holding)
        lower.parent, lower.start_blocks = parent, upper.start_blocks
        lower.hashes = upper.hashes + lower.hashes
        parent.children = with_entry(parent.children, lower.hashes[0], lower)
        for block in upper.hashes:
            self.index[block] = lower

    def check(self) -> None:
        """Assert every invariant of the tree; for tests."""
        seen: dict[int, Node] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            for first, child in node.children.items():
                assert child.parent is node
                assert len(child) > 0
                assert child.hashes[0] == first
                assert child.start_blocks == node.end_blocks
                for holding in child.holdings.values():
                    holding.check(child)
                for block in child.hashes:
                    assert block not in seen
                    seen[block] = child
                stack.append(child)
        assert seen == self.index
