"""The prefix tree: one radix tree over chained block hashes, shared by all engines and models.

A node is a run of blocks that every prompt through it shares. Because hashes are chained, one hash identifies a whole
prefix. So a match is a bisection in each node, and chains of different models never meet below the root. Each node has
a `Holding` for each engine: the engine's blocks of the node, and the calls that shared it recently. See
docs/design/prefix-tree.md.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.policy.prefix.node import Node
from plait.policy.prefix.small_mapping import with_entry, without_entry


@dataclass(frozen=True, slots=True)
class Segment:
    """The first `blocks` blocks of a node, matched by a prompt. Only a path's last segment may be part of its node."""

    node: Node
    blocks: int


class PrefixTree:
    """The radix tree.

    `ends` has, for each engine, the nodes with resident blocks by the last one of these. `_only_child` has nodes that
    may be merged with their only child. `_most_children` is the most children of the root since its dict was made.
    """

    def __init__(self) -> None:
        self.root = Node(None, 0, array("Q"))
        self.ends: defaultdict[str, dict[int, Node]] = defaultdict(dict)
        self._blocks = 0
        self._most_children = 0
        self._only_child: dict[Node, None] = {}

    def __len__(self) -> int:
        """Blocks in the tree."""
        return self._blocks

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, ancestors first."""
        stack = [self.root]
        while stack:
            children = list(stack.pop().children.values())
            yield from children
            stack += children

    def match(self, hashes: Sequence[int]) -> list[Segment]:
        """The path that `hashes` shares with the tree, root first. Changes nothing. O(nodes x log of their blocks)."""
        segments = []
        node, position, length = self.root, 0, len(hashes)
        while position < length:
            child = node.children.get(hashes[position])
            if child is None:
                break
            common = child.common_blocks(0, hashes, position)
            segments.append(Segment(child, common))
            if common < len(child.hashes):
                break
            position += common
            node = child
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
        parent.children = with_entry(parent.children, leaf.hashes[0], leaf)
        self._blocks += len(leaf)
        return leaf

    def extend(self, node: Node, hashes: Sequence[int]) -> Node:
        """Add `hashes` after `node` and return the node that has them. None of them may be in the tree.

        A leaf that no call spans grows, so that an output reported block by block stays one node. A leaf that calls
        span gets a child, because calls span whole nodes.
        """
        if node.parent is None or node.children or any(h.bookings or h.sharers for h in node.holdings.values()):
            return self.add_leaf(node, hashes)
        node.hashes.extend(hashes)
        self._blocks += len(hashes)
        return node

    def split(self, node: Node, blocks: int) -> Node:
        """Cut `node` after its first `blocks` blocks and return the new upper part.

        The lower part stays the same object, because calls that end there refer to it. They span the upper part too.
        """
        assert node.parent is not None
        assert 0 < blocks < len(node)
        upper = Node(node.parent, node.start_blocks, node.hashes[:blocks])
        upper.use_count, upper.used_s = node.use_count, node.used_s
        node.parent.children = with_entry(node.parent.children, upper.hashes[0], upper)
        node.hashes = node.hashes[blocks:]
        node.start_blocks += blocks
        node.parent = upper
        upper.children = with_entry(upper.children, node.hashes[0], node)
        for engine_id, holding in list(node.holdings.items()):
            above = holding.split(upper, blocks)
            upper.holdings = with_entry(upper.holdings, engine_id, above)
            if above.resident_blocks:
                self.ends[engine_id][upper.hashes[above.resident_blocks - 1]] = upper
            node.drop_unused(engine_id)
        return upper

    def prune(self, node: Node) -> int:
        """Drop blocks that no engine needs, from `node` upwards; returns how many nodes left the tree."""
        removed = 0
        while node.parent is not None and not node.children:
            keep = 0
            for holding in node.holdings.values():
                keep = max(keep, holding.needed_blocks())
            self._blocks -= len(node.hashes) - keep
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
        """Merge nodes that nothing divides any more, and give unused memory of the root back.

        Called about once a second, and never while nodes are walked: a prefix that is shared again and again is then
        split and merged at most once a second. Each block that moves was moved by a split before.
        """
        nodes, self._only_child = self._only_child, {}
        for node in nodes:
            self._merge(node)
        children = self.root.children
        self._most_children = max(self._most_children, len(children))
        if 2 * len(children) < self._most_children and isinstance(children, dict):
            self.root.children = dict(children)  # a dict from which keys are deleted keeps its size; its copy does not
            self._most_children = len(children)

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
            below = lower.holding(engine_id)
            if below.resident_blocks:
                del self.ends[engine_id][upper.hashes[-1]]
            elif holding.resident_blocks:
                self.ends[engine_id][upper.hashes[holding.resident_blocks - 1]] = lower
            below.join(holding)
        lower.parent, lower.start_blocks = parent, upper.start_blocks
        lower.hashes = upper.hashes + lower.hashes
        parent.children = with_entry(parent.children, lower.hashes[0], lower)

    def check(self) -> None:
        """Assert every invariant of the tree; for tests."""
        blocks, ends = 0, defaultdict[str, dict[int, Node]](dict)
        for node in self.nodes():
            blocks += len(node)
            assert len(node) > 0
            assert node.parent is not None
            assert node.parent.children[node.hashes[0]] is node
            assert node.start_blocks == node.parent.end_blocks
            for engine_id, holding in node.holdings.items():
                holding.check(node)
                if holding.resident_blocks:
                    ends[engine_id][node.hashes[holding.resident_blocks - 1]] = node
        assert blocks == len(self)
        assert ends == {engine_id: nodes for engine_id, nodes in self.ends.items() if nodes}
