"""Residency: which prefixes one engine holds, by its own reports (docs/design/residency.md).

The engine reports the blocks that its cache stored and removed. Between reports, the prefixes of booked calls are
expected. Nodes are kept in the order of their last use, descendants before ancestors. An LRU cache of reference-counted
blocks evicts them in this order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, pairwise

from plait.policy.prefix.prefix_tree import Holding, Node, PrefixTree, Segment

Run = tuple[int | None, Sequence[int]]
"""(The block before the run, None at the root; the hashes of its blocks)."""

Victim = tuple[Node, int]
"""A node, and how many of its last resident blocks are evicted."""


class Residency:
    """One engine's part of the shared prefix tree: its `resident` blocks, and the blocks of booked calls.

    An engine that does not report has at most `most_blocks` resident; None: its size is not known.
    """

    def __init__(self, engine_id: str, tree: PrefixTree) -> None:
        self.engine_id = engine_id
        self.most_blocks: int | None = None
        self._tree = tree
        self._order = UseOrder(engine_id, tree.root)
        self.resident = ResidentBlocks(engine_id, tree, self._order)

    def held_blocks(self, path: Sequence[Segment]) -> int:
        """The length of the longest run of blocks from the root of `path` that is resident or expected here.

        Of a node, blocks that are expected to be evicted for a booked call do not count, unless calls span the node.
        """
        total, engine_id = 0, self.engine_id
        for node, blocks in path:
            holding = node.first
            if holding is None or holding.engine_id != engine_id:
                holding = node.others.get(engine_id)
                if holding is None:
                    break
            if not holding.bookings:
                staying = holding.resident_blocks - holding.leaving_blocks
                if staying < blocks:
                    return total + staying
            total += blocks
        return total

    def book(self, leaf: Node, *, waits: bool = False) -> None:
        """A call that ends at `leaf` was booked here. Its blocks are expected, and it shares them within H.

        If it `waits`, it was not sent yet; `send` follows.
        """
        node, engine_id = leaf, self.engine_id
        while (parent := node.parent) is not None:
            holding = node.first
            if holding is None or holding.engine_id != engine_id:
                holding = node.holding(engine_id)
            holding.bookings += 1
            holding.sharers += 1
            holding.waiting += waits
            self._order.use(holding)
            node = parent

    def join(self, leaf: Node) -> int:
        """Another gateway's call that ends at `leaf` was sent here. Its blocks are expected; it shares none within H.

        Returns its `ready_blocks` without itself.
        """
        total, node, engine_id = 0, leaf, self.engine_id
        while (parent := node.parent) is not None:
            holding, blocks = node.first, len(node.hashes)
            if holding is None or holding.engine_id != engine_id:
                holding = node.holding(engine_id)
            staying = holding.resident_blocks - holding.leaving_blocks
            total = total + blocks if holding.bookings > holding.waiting or staying == blocks else staying
            holding.bookings += 1
            self._order.use(holding)
            node = parent
        return total

    def send(self, leaf: Node) -> None:
        """A call does not wait any more: the engine will compute its blocks."""
        for node in leaf.path():
            holding = node.held_by(self.engine_id)
            assert holding is not None
            holding.waiting -= 1

    def ready_blocks(self, leaf: Node) -> int:
        """The length of the longest run of blocks from the root to `leaf` that is here, or that sent calls compute.

        A call has to be booked at `leaf`.
        """
        total, node, engine_id = 0, leaf, self.engine_id
        while node.parent is not None:  # many waiting calls are asked about for each that is sent
            holding, blocks = node.first, len(node.hashes)
            if holding is None or holding.engine_id != engine_id:
                holding = node.others[engine_id]
            staying = holding.resident_blocks - holding.leaving_blocks
            total = total + blocks if holding.bookings > holding.waiting or staying == blocks else staying
            node = node.parent
        return total

    def touch(self, leaf: Node) -> None:
        """The prefix that ends at `leaf` was in use until now."""
        self._order.touch_path(leaf)

    def unbook(self, leaf: Node, *, waits: bool = False) -> None:
        """The call's blocks are no longer expected. Only its resident blocks stay. One that `waits` was not sent."""
        node, engine_id = leaf, self.engine_id
        while (parent := node.parent) is not None:
            holding = node.first
            if holding is None or holding.engine_id != engine_id:
                holding = node.others[engine_id]
            holding.bookings -= 1
            holding.waiting -= waits
            if not holding.bookings:
                if holding.resident_blocks:
                    self._order.unbooked(holding)
                else:
                    node.drop_unused(holding)
            node = parent
        self._tree.prune(leaf)

    def unshare(self, leaf: Node) -> None:
        """The call left the window H."""
        node, engine_id = leaf, self.engine_id
        while (parent := node.parent) is not None:
            holding = node.first
            if holding is None or holding.engine_id != engine_id:
                holding = node.others[engine_id]
            holding.sharers -= 1
            if not holding.resident_blocks and not holding.bookings:
                node.drop_unused(holding)
            node = parent
        self._tree.prune(leaf)

    def victims(self, blocks: int, keep: Collection[Node] = ()) -> Iterator[Victim]:
        """The victims that LRU would evict next to free `blocks`. Booked nodes and nodes in `keep` stay."""
        for holding in self._order.free():
            if blocks <= 0:
                return
            if holding.node in keep:
                continue
            taken = min(blocks, holding.resident_blocks - holding.leaving_blocks)
            blocks -= taken
            yield holding.node, taken

    def expect_eviction(self, blocks: int) -> list[Victim]:
        """A booked call needs `blocks` more than are free. The blocks that LRU evicts then no longer count as held."""
        victims = [victim for victim in self.victims(blocks) if victim[1]]
        for node, taken in victims:
            node.holding(self.engine_id).leaving_blocks += taken
        return victims

    def end_expectation(self, victims: Sequence[Victim]) -> None:
        """The call's prompt is computed, or the call has ended. `victims` that were not evicted count as held again."""
        for victim, taken in victims:
            rest = taken
            for node in victim.path():  # a split since then moved part of the node to an ancestor
                holding = node.held_by(self.engine_id)
                spared = min(rest, holding.leaving_blocks) if holding is not None else 0
                if holding is not None:
                    holding.leaving_blocks -= spared
                rest -= spared
                if rest == 0:
                    break

    def assume_stored(self, leaf: Node, *, is_booked: bool) -> None:
        """The engine does not report: it has stored the prefix that ends at `leaf`, and has evicted others for it.

        If a call `is_booked` there, that has ended.
        """
        node, engine_id, resident = leaf, self.engine_id, self.resident
        while (parent := node.parent) is not None:
            blocks = len(node.hashes)
            holding = node.first
            if holding is None or holding.engine_id != engine_id:
                holding = node.holding(engine_id)
            if blocks > holding.resident_blocks:
                resident.keep(holding, blocks)
            holding.bookings -= is_booked
            self._order.use(holding)
            node = parent
        if is_booked:
            self._tree.prune(leaf)
        if self.most_blocks is not None and resident.blocks > self.most_blocks:
            self.evict(resident.blocks - self.most_blocks)

    def evict(self, blocks: int) -> None:
        """Assume that `blocks` were evicted in LRU order; for engines that do not report."""
        for node, taken in self.victims(blocks):
            self.resident.evict(node, taken)

    def check(self) -> None:
        """Assert that the total and the order of use agree with the tree, and that no prefix has a gap; for tests."""
        nodes = [node for node in self._tree.nodes() if self.engine_id in node.holdings]
        assert self.resident.blocks == sum(self.resident.of(node) for node in nodes)
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
        holding = node.held_by(self._engine_id)
        return 0 if holding is None else holding.resident_blocks

    def apply(self, removed: Iterable[int], stored: Iterable[Run]) -> None:
        """A report: the engine evicted blocks, then stored runs of blocks. Raises ValueError as `store` does."""
        finder = BlockFinder(self._engine_id, self._ends, self._order)
        for block in removed:
            self._remove(block, finder)
        for parent, hashes in stored:
            self._store(parent, hashes, finder)

    def store(self, parent: int | None, hashes: Sequence[int]) -> None:
        """The engine stored the blocks `hashes`, which follow the block `parent` (None: they begin a chain).

        A run whose parent is not resident here cannot be reached from the root. It is ignored. Raises ValueError for a
        run in which a block follows itself, or ends where another of the engine's runs ends.
        """
        self.apply((), [(parent, hashes)])

    def remove(self, block: int) -> None:
        """The engine evicted a block. The blocks after it go too: they can no longer be reached from the root."""
        self.apply([block], ())

    def _store(self, parent: int | None, hashes: Sequence[int], finder: BlockFinder) -> None:
        node, offset = self._tree.root, 0
        if parent is not None:
            found = finder.find(parent)
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
        finder.stored(hashes, node)
        self._order.touch_path(node)

    def _extend(self, node: Node, fresh: Sequence[int]) -> Node:
        """Put new blocks after `node`."""
        once = set(fresh)
        known = (self._ends, *(above.hashes for above in node.path()))
        if len(once) < len(fresh) or not all(map(once.isdisjoint, known)):
            raise _contradiction()
        return self._tree.extend(node, fresh)

    def _remove(self, block: int, finder: BlockFinder) -> None:
        found = finder.find(block)
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

    def _shrink(self, node: Node, blocks: int) -> None:
        holding = node.holding(self._engine_id)
        holding.leaving_blocks = max(0, holding.leaving_blocks - (holding.resident_blocks - blocks))
        self.keep(holding, blocks)
        node.drop_unused(holding)
        self._tree.prune(node)

    def keep(self, holding: Holding, blocks: int) -> None:
        """Have the first `blocks` blocks of a node be the resident ones. Raises ValueError if another ends there."""
        node, hashes, before = holding.node, holding.node.hashes, holding.resident_blocks
        if blocks and self._ends.get(hashes[blocks - 1], node) is not node:
            raise _contradiction()
        if before:
            del self._ends[hashes[before - 1]]
        if blocks:
            self._ends[hashes[blocks - 1]] = node
        holding.resident_blocks = blocks
        self.blocks += blocks - before


class UseOrder:
    """An engine's holdings, in two rings through a sentinel each, least recently used first.

    What calls have booked is in a ring of its own: it is not evicted, and many calls may wait. Each step is O(1). Only
    a holding whose last booking has gone passes those that were used after it, one by one.
    """

    def __init__(self, engine_id: str, sentinel_node: Node) -> None:
        self._engine_id = engine_id
        self._free, self._booked = Holding(sentinel_node, engine_id), Holding(sentinel_node, engine_id)
        self._uses = count(1)
        for ring in (self._free, self._booked):
            ring.older = ring.newer = ring

    def __iter__(self) -> Iterator[Holding]:
        """The holdings that are not booked, then those that are. The current one may be unlinked during the loop."""
        yield from self.free()
        yield from _around(self._booked)

    def free(self) -> Iterator[Holding]:
        """The holdings that are not booked. The current one may be unlinked during the loop."""
        return _around(self._free)

    def use(self, holding: Holding) -> None:
        """From now on `holding` is the most recently used of its ring. It may have been in the other, or in none."""
        older, newer = holding.older, holding.newer
        if older is not None and newer is not None:
            older.newer, newer.older = newer, older
        ring = self._booked if holding.bookings else self._free
        latest = ring.older
        assert latest is not None
        holding.used, holding.older, holding.newer = next(self._uses), latest, ring
        latest.newer = ring.older = holding

    def touch_path(self, leaf: Node) -> None:
        """Make the engine's holdings on the path to `leaf` the most recently used of their rings, ancestors last."""
        node, engine_id = leaf, self._engine_id
        while (parent := node.parent) is not None:
            holding = node.first
            if holding is None or holding.engine_id != engine_id:
                holding = node.others.get(engine_id)
            if holding is not None and (holding.bookings or holding.resident_blocks):
                self.use(holding)
            node = parent

    def unbooked(self, holding: Holding) -> None:
        """The last booking of `holding` has gone. It was used when it was last touched."""
        older, newer = holding.older, holding.newer
        if older is not None and newer is not None:
            older.newer, newer.older = newer, older
        newer, older = self._free, self._free.older
        while older is not None and older.used > holding.used:
            newer, older = older, older.older
        assert older is not None
        holding.older, holding.newer = older, newer
        older.newer = newer.older = holding


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
            return node, node.holding(self._engine_id).resident_blocks - 1
        node = self._index().get(block)
        while node is not None:
            holding = node.held_by(self._engine_id)
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


def _around(ring: Holding) -> Iterator[Holding]:
    holding = ring.newer
    while holding is not None and holding is not ring:
        following = holding.newer
        yield holding
        holding = following


def _contradiction() -> ValueError:
    return ValueError("the report puts a block after two different ones")
