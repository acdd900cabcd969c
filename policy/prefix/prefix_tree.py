"""The prefix tree: one radix tree over chained block hashes, shared by all engines and models.

A node is a run of blocks that every prompt through it shares. Because hashes are chained, one hash identifies a whole
prefix. So a match is a bisection in each node, and chains of different models never meet below the root.

A node has a `Holding` for each engine: how many leading blocks the engine has, and the calls whose prompts span the
node. A call ends at the end of a node: `insert` splits a node where a new prompt leaves it, `tidy` merges nodes that no
call and no engine tells apart, and `prune` drops blocks that no engine has and no call spans. Splits and merges keep
the lower node object, because calls refer to it. See docs/design/prefix-tree.md.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from typing import Final, NamedTuple

USES_S = 60.0
"""The time constant by which uses of a prefix decay: uses can be predicted about as long ahead."""

NO_BRANCHES: Final[dict[int, Node]] = {}
NO_HOLDINGS: Final[dict[str, Holding]] = {}
"""Both stay empty: all nodes without branches or other holdings share them. A dict of its own takes 200 bytes."""


class Node:
    """A run of blocks; `start_blocks` blocks of the prompt come before it.

    A node has an `only_child`, or several children in `branches`, by their first block. Most nodes have one engine's
    holding, `first`; further ones are in `others`, by engine. Hot loops read both attributes without a function call.
    `use_count` is the decayed number of uses as of `used_s`.
    """

    __slots__ = (
        *("branches", "first", "hashes", "only_child", "others", "parent", "start_blocks", "use_count", "used_s"),
    )

    def __init__(self, parent: Node | None, start_blocks: int, hashes: array[int]) -> None:
        self.parent = parent
        self.start_blocks = start_blocks
        self.hashes = hashes
        self.only_child: Node | None = None
        self.branches = NO_BRANCHES
        self.first: Holding | None = None
        self.others = NO_HOLDINGS
        self.use_count = self.used_s = 0.0

    def __len__(self) -> int:
        return len(self.hashes)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Node(start={self.start_blocks}, blocks={len(self.hashes)}, holdings={self.holdings})"

    @property
    def end_blocks(self) -> int:
        """Blocks of the prompt up to and including this node."""
        return self.start_blocks + len(self.hashes)

    # Children.

    @property
    def children(self) -> Mapping[int, Node]:
        """The children by their first block, the oldest first; read-only."""
        return self.branches if self.only_child is None else {self.only_child.hashes[0]: self.only_child}

    def add_child(self, child: Node) -> None:
        """Add a child, or replace the child with the same first block."""
        first_block, only = child.hashes[0], self.only_child
        if only is not None and only.hashes[0] != first_block:
            self.branches, self.only_child = {only.hashes[0]: only, first_block: child}, None
        elif self.branches:
            self.branches[first_block] = child
        else:
            self.only_child = child

    def drop_child(self, first_block: int) -> None:
        """Remove a child."""
        if self.only_child is not None:
            self.only_child = None
            return
        del self.branches[first_block]
        if len(self.branches) == 1:
            (self.only_child,) = self.branches.values()
            self.branches = NO_BRANCHES

    # Holdings.

    @property
    def holdings(self) -> Mapping[str, Holding]:
        """The holdings by engine, the oldest first: a copy."""
        return {} if self.first is None else {self.first.engine_id: self.first, **self.others}

    def holding_of(self, engine_id: str) -> Holding | None:
        first = self.first
        return first if first is not None and first.engine_id == engine_id else self.others.get(engine_id)

    def holding(self, engine_id: str) -> Holding:
        """The engine's holding, made if absent; `drop_unused` removes it once it is empty."""
        holding = self.holding_of(engine_id)
        if holding is None:
            holding = Holding(self, engine_id)
            self.add_holding(holding)
        return holding

    def add_holding(self, holding: Holding) -> None:
        """Add the holding of an engine that has none."""
        if self.first is None:
            self.first = holding
        elif self.others is NO_HOLDINGS:
            self.others = {holding.engine_id: holding}
        else:
            self.others[holding.engine_id] = holding

    def drop_unused(self, holding: Holding) -> None:
        """Remove the holding if it is empty. A holding that only has sharers stays, but leaves the order of use."""
        if holding.resident_blocks or holding.bookings:
            return
        holding.unlink()
        if holding.sharers:
            return
        if holding is self.first:
            oldest = next(iter(self.others), None)
            self.first = None if oldest is None else self.others.pop(oldest)
        else:
            del self.others[holding.engine_id]
        if not self.others:
            self.others = NO_HOLDINGS

    def can_join(self, lower: Node) -> bool:
        """Whether this node can merge with `lower`, its only child: on every engine, no call ends between the two, and
        they are neighbours in the order of use, so a merge changes no eviction.
        """
        return all(holding.can_join(lower.holding_of(engine_id)) for engine_id, holding in self.holdings.items())

    def common_blocks(self, offset: int, hashes: Sequence[int], start: int) -> int:
        """How many leading blocks `self.hashes[offset:]` and `hashes[start:]` share. The chain allows a bisection."""
        low, high = 0, min(len(self.hashes) - offset, len(hashes) - start)
        while low < high:
            middle = (low + high + 1) // 2
            if self.hashes[offset + middle - 1] == hashes[start + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    # Uses.

    def use(self, now_s: float) -> None:
        """A call whose prompt ends at this node was placed, on any engine."""
        node = self
        while (parent := node.parent) is not None:
            count = node.use_count
            node.use_count = 1.0 + count * exp((node.used_s - now_s) / USES_S) if count else 1.0
            node.used_s = now_s
            node = parent

    def uses(self, now_s: float) -> float:
        """The placed calls that span the node, decayed: about those of the last `USES_S`."""
        return self.use_count * exp((self.used_s - now_s) / USES_S) if self.use_count else 0.0

    def path(self) -> Iterator[Node]:
        """The node itself, then its ancestors up to the root, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def segments(self) -> list[Segment]:
        """As `path`, root first, as a prompt that ends at the node matches it."""
        return [Segment(node, len(node.hashes)) for node in self.path()][::-1]


class Holding:
    """One engine's leading blocks of one node; also a link in that engine's order of use.

    - `resident_blocks`: leading blocks that the engine reported, or is assumed to have stored.
    - `leaving_blocks`: the last resident blocks that are expected to be evicted for booked calls.
    - `bookings`: booked calls that span the node, until a report after their end confirms them. All blocks of the node
      are expected while there is one, since a call spans whole nodes.
    - `waiting`: the bookings whose calls wait in the gateway.
    - `sharers`: calls placed here within the window H.
    - `ends`, `expected_ends`: on an engine that tells where hits can end (`policy.prefix.hit_ends`), a bit for each
      block of the node after which one can, or will be able to once a booked call is computed.
    - `seam`: in an estimated cache, whether a hit can end with the node, for an engine that keeps what a hit needs at
      some places only. 0: not known. 1: a further prompt has passed there. 2: a hit has reached it.
    - `used`: a counter; the higher one was used later.
    """

    __slots__ = (
        *("bookings", "ends", "engine_id", "expected_ends", "leaving_blocks", "newer", "node"),
        *("older", "resident_blocks", "seam", "sharers", "used", "waiting"),
    )

    def __init__(
        self, node: Node, engine_id: str, resident_blocks: int = 0, bookings: int = 0, sharers: int = 0
    ) -> None:
        self.node = node
        self.engine_id = engine_id
        self.resident_blocks = resident_blocks
        self.bookings = bookings
        self.sharers = sharers
        self.waiting = 0
        self.used = 0
        self.leaving_blocks = self.seam = self.ends = self.expected_ends = 0
        self.older: Holding | None = None
        self.newer: Holding | None = None

    def __bool__(self) -> bool:
        return self.is_cached or self.sharers > 0

    def __repr__(self) -> str:
        return f"Holding(resident={self.resident_blocks}, bookings={self.bookings}, sharers={self.sharers})"

    @property
    def is_cached(self) -> bool:
        """Whether blocks of the node are resident or expected. Only then the holding is in the order of use."""
        return self.resident_blocks > 0 or self.bookings > 0

    @property
    def cached_blocks(self) -> int:
        """Leading blocks of the node that are resident or expected, and not expected to be evicted."""
        return len(self.node.hashes) if self.bookings else self.resident_blocks - self.leaving_blocks

    def split(self, upper: Node, blocks: int) -> Holding:
        """Make the holding of `upper`, which takes over the first `blocks`. It is next in the order of use."""
        above = Holding(upper, self.engine_id, min(blocks, self.resident_blocks), self.bookings, self.sharers)
        above.waiting, above.used = self.waiting, self.used
        self.resident_blocks = max(0, self.resident_blocks - blocks)
        above.leaving_blocks = max(0, self.leaving_blocks - self.resident_blocks)
        self.leaving_blocks -= above.leaving_blocks
        above.ends, above.expected_ends = self.ends & ((1 << blocks) - 1), self.expected_ends & ((1 << blocks) - 1)
        self.ends >>= blocks
        self.expected_ends >>= blocks
        if self.newer is not None:
            above.link_between(self, self.newer)
        return above

    def can_join(self, below: Holding | None) -> bool:
        """Whether one holding can replace this one and `below`, the engine's holding of the node's only child.

        The same calls have to span both, and no other node may be between them in the order of use.
        """
        if self.leaving_blocks:  # in one holding, these blocks would be before the resident ones of `below`
            return False
        if below is None:
            return not self.bookings and not self.sharers
        calls, calls_below = (self.bookings, self.sharers, self.waiting), (below.bookings, below.sharers, below.waiting)
        return calls == calls_below and (not below.is_cached or self.older is below)

    def join(self, above: Holding) -> None:
        """Take over the blocks of `above`, the upper part of the node, and its place in the order of use."""
        blocks = len(above.node.hashes)
        self.ends, self.expected_ends = (
            self.ends << blocks | above.ends,
            self.expected_ends << blocks | above.expected_ends,
        )
        self.resident_blocks += above.resident_blocks
        self.used = above.used
        older, newer = above.older, above.newer
        above.unlink()
        if self.older is None and older is not None and newer is not None:
            self.link_between(older, newer)

    def link_between(self, older: Holding, newer: Holding) -> None:
        """Enter the order of use between two neighbours."""
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def unlink(self) -> None:
        """Leave the order of use, if the holding is in it."""
        if self.older is not None and self.newer is not None:
            self.older.newer, self.newer.older = self.newer, self.older
            self.older = self.newer = None


class Segment(NamedTuple):
    """The first `blocks` blocks of a node, matched by a prompt. Only a path's last segment may be part of its node."""

    node: Node
    blocks: int


class PrefixTree:
    """The radix tree. `ends` has, for each engine, each node with resident blocks, by the last resident block."""

    def __init__(self) -> None:
        self.root = Node(None, 0, array("Q"))
        self.ends: defaultdict[str, dict[int, Node]] = defaultdict(dict)
        self._blocks = 0
        self._most_children = 0  # of the root, since its dict was made
        self._only_child: dict[Node, None] = {}  # nodes that `tidy` may merge with their only child
        # The latest match (chain, its length, path), until the tree changes: a call is booked right after its
        # placement, so the second match is free.
        self._matched: tuple[Sequence[int], int, list[Segment]] | None = None

    def __len__(self) -> int:
        return self._blocks

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, ancestors first."""
        stack = [self.root]
        while stack:
            children = list(stack.pop().children.values())
            yield from children
            stack += children

    def match(self, hashes: Sequence[int]) -> list[Segment]:
        """The path that `hashes` shares with the tree, root first, in O(nodes x log of their blocks)."""
        segments = []
        node, position, length = self.root, 0, len(hashes)
        while position < length:
            child = node.only_child
            if child is None or child.hashes[0] != hashes[position]:
                child = node.branches.get(hashes[position])
                if child is None:
                    break
            blocks = len(child.hashes)
            end = position + blocks
            if end > length or child.hashes[-1] != hashes[end - 1]:
                common = child.common_blocks(0, hashes, position)
                segments.append(Segment(child, common))
                if common < blocks:
                    break
            else:  # the last hashes are equal, and each stands for all blocks before it
                segments.append(Segment(child, blocks))
            position, node = end, child
        self._matched = hashes, length, segments
        return segments

    def insert(self, hashes: Sequence[int]) -> Node:
        """Insert a chain that begins at the root. Returns the node that ends with the chain."""
        chain, length, path = self._matched or (None, 0, [])
        if chain is not hashes or length != len(hashes):
            path = self.match(hashes)
        if not path:
            return self.add_leaf(self.root, hashes) if len(hashes) else self.root
        node, blocks = path[-1]
        end = node.start_blocks + blocks
        if blocks < len(node.hashes):
            node = self.split(node, blocks)
        return self.add_leaf(node, hashes[end:]) if end < len(hashes) else node

    def add_leaf(self, parent: Node, hashes: Sequence[int]) -> Node:
        """Add the blocks `hashes` below `parent`. None of them may be in the tree."""
        leaf = Node(parent, parent.start_blocks + len(parent.hashes), array("Q", hashes))
        parent.add_child(leaf)
        self._matched = None
        self._blocks += len(leaf.hashes)
        return leaf

    def extend(self, node: Node, hashes: Sequence[int]) -> Node:
        """Add `hashes` after `node` and return the node that has them. None of them may be in the tree.

        A leaf that no call spans grows, so that an output that is reported block by block stays one node. A leaf that a
        call spans gets a child, because a call spans whole nodes.
        """
        if node.parent is None or node.children or any(h.bookings or h.sharers for h in node.holdings.values()):
            return self.add_leaf(node, hashes)
        node.hashes.extend(hashes)
        self._matched = None
        self._blocks += len(hashes)
        return node

    def split(self, node: Node, blocks: int) -> Node:
        """Cut `node` after its first `blocks` and return the new upper part. `node` becomes the lower part."""
        assert node.parent is not None
        assert 0 < blocks < len(node)
        self._matched = None
        upper = Node(node.parent, node.start_blocks, node.hashes[:blocks])
        upper.use_count, upper.used_s = node.use_count, node.used_s
        node.parent.add_child(upper)
        node.hashes = node.hashes[blocks:]
        node.start_blocks += blocks
        node.parent = upper
        upper.add_child(node)
        for engine_id, holding in node.holdings.items():
            above = holding.split(upper, blocks)
            upper.add_holding(above)
            if above.resident_blocks:
                self.ends[engine_id][upper.hashes[above.resident_blocks - 1]] = upper
            node.drop_unused(holding)
        return upper

    def prune(self, node: Node) -> int:
        """Drop blocks that no engine needs, from `node` upwards; returns how many nodes left the tree.

        An engine needs all blocks of a node that a call spans, otherwise only its resident ones.
        """
        removed, self._matched = 0, None
        while (parent := node.parent) is not None and node.only_child is None and not node.branches:
            keep, blocks, holding = 0, len(node.hashes), node.first
            if holding is not None:
                keep = blocks if holding.bookings or holding.sharers else holding.resident_blocks
                for other in node.others.values():
                    keep = max(keep, blocks if other.bookings or other.sharers else other.resident_blocks)
            if keep == blocks:
                break
            self._blocks -= blocks - keep
            if keep:
                del node.hashes[keep:]
                break
            parent.drop_child(node.hashes[0])
            removed += 1
            node = parent
        if node.only_child is None and not node.branches and node.parent is not None:
            node = node.parent
        if node.only_child is not None and node.parent is not None:
            self._only_child[node] = None  # may be mergeable now: `tidy` checks
        return removed

    def tidy(self) -> None:
        """Merge nodes that no call and no engine tells apart any more, and free unused memory of the root.

        Called about once a second, and never while nodes are walked. So a prefix that calls share again and again is
        split and merged at most once a second. Each block that a merge moves was moved by a split before.
        """
        nodes, self._only_child = self._only_child, {}
        for node in nodes:
            self._merge(node)
        branches = self.root.branches
        self._most_children = max(self._most_children, len(branches))
        if branches and 2 * len(branches) < self._most_children:
            self.root.branches = dict(branches)  # a dict from which keys are deleted keeps its size; its copy does not
            self._most_children = len(branches)

    def _merge(self, upper: Node) -> None:
        """Merge a node into its only child, if both are still in the tree and `can_join`."""
        parent, self._matched = upper.parent, None
        assert parent is not None
        lower = upper.only_child
        if lower is None or parent.children.get(upper.hashes[0]) is not upper or not upper.can_join(lower):
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
        parent.add_child(lower)
        upper.hashes, upper.parent = array("Q"), lower  # leads from a block's old node to its new one
