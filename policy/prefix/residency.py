"""Residency: which prefixes one engine holds, by its own reports (docs/design/residency.md).

In: the engine's reports of stored and removed blocks (`resident.apply`), and between reports the steps of a call:
`book`, `send`, `touch`, `unbook` and, after the window H, `unshare`. A booked call's prefix is expected in the cache.
Out: how much of a prompt is cached (`cached_blocks`), and what LRU evicts next (`victims`).

Invariants: an engine's cached blocks are runs from the root without gaps. In the order of last use, descendants come
before ancestors, because an LRU cache of reference-counted blocks evicts in this order.

Below the accelerator an engine may have further tiers: host memory, disk. LRU caches that evict to each other have
together what one cache of their total size would have. So a tier's residency is what is in the tier or a faster one. It
is in the same tree, with holdings of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import inf
from typing import Final

from plait.policy.prefix.hit_ends import EndRule, HitEnds
from plait.policy.prefix.learned_cache import Reach
from plait.policy.prefix.prefix_tree import Node, PrefixTree, Segment
from plait.policy.prefix.resident_blocks import ResidentBlocks
from plait.policy.prefix.use_order import UseOrder

DEVICE: Final = "device"
"""The tier whose blocks are used without a transfer."""

Victim = tuple[Node, int]
"""(node, how many of its last resident blocks are evicted)."""


class Residency:
    """One engine's part of the shared prefix tree: its `resident` blocks, and the blocks of booked calls.

    For an engine that does not report, `most_blocks` is the cache's size (None: not known), and `finds_nothing` says
    that its caching seems to be off, so that blocks of calls under way do not count either. `lower` is the residency of
    the next tier. `engine_id` names the holdings in the tree; a lower tier's has the tier's name appended. `ends` is
    None if a hit can end after each block.
    """

    def __init__(self, engine_id: str, tree: PrefixTree, tier: str = DEVICE) -> None:
        self.engine_id = engine_id
        self.tier = tier
        self.lower: Residency | None = None
        self.most_blocks: int | None = None
        self.finds_nothing = False
        self.ends: HitEnds | None = None
        self._tree = tree
        self._order = UseOrder(engine_id, tree.root)
        self.resident = ResidentBlocks(engine_id, tree, self._order)

    def use_rule(self, rule: EndRule | None) -> None:
        """Where calls leave ends of hits, by the engine's report; None: a hit can end after each block."""
        before = self.ends
        if before is not None and before.rule != rule:
            before.confirm(inf)  # its calls leave other ends
        if rule is None:
            self.ends = None
        elif before is None or before.rule != rule:
            self.ends = HitEnds(self.engine_id, rule)

    # Tiers.

    @property
    def tiers(self) -> Sequence[Residency]:
        """The residencies of the lower tiers, the fastest first."""
        return () if self.lower is None else (self.lower, *self.lower.tiers)

    @property
    def widest(self) -> Residency:
        """The last tier's residency. A node with a holding of any tier has one of this tier."""
        return self if self.lower is None else self.lower.widest

    def use_tiers(self, names: Sequence[str]) -> None:
        """The engine has reported its lower tiers. If they changed, the old tiers are forgotten."""
        if [one.tier for one in self.tiers] == list(names):
            return
        if self.lower is not None:
            self.lower.use_tiers(())
            self.lower.forget()
            self.lower = None
        if names:
            self.lower = Residency(f"{self.engine_id} {names[0]}", self._tree, names[0])
            self.lower.book_as(self.engine_id, self._order)
            self.lower.resident.cover(self.resident, list(self._tree.ends[self.engine_id].values()))
            self.lower.use_tiers(names[1:])

    def book_as(self, engine_id: str, order: UseOrder) -> None:
        """Copy the bookings and sharers of another tier of the engine, whose `order` of use is given."""
        for holding in [node.holding_of(engine_id) for node in self._tree.nodes()]:
            if holding is not None and (holding.bookings or holding.sharers):
                own = holding.node.holding(self.engine_id)
                own.bookings, own.waiting, own.sharers = holding.bookings, holding.waiting, holding.sharers
        for holding in list(order):
            if holding.bookings:
                self._order.use(holding.node.holding(self.engine_id))

    def clear(self) -> None:
        """In all tiers, no block is resident until it is reported again."""
        for one in (self, *self.tiers):
            one.resident.clear()
        if self.ends is not None:
            self.ends.clear()

    def forget(self) -> None:
        """The engine or this tier is gone: removes all of its holdings."""
        self.resident.clear()
        for node in list(self._tree.nodes()):
            holding = node.holding_of(self.engine_id)
            if holding is not None:
                holding.bookings = holding.waiting = holding.sharers = 0
                node.drop_unused(holding)
        self._tree.ends.pop(self.engine_id, None)

    def cached_blocks(self, path: Sequence[Segment]) -> int:
        """The leading blocks of `path` that are resident or expected, and not expected to be evicted."""
        if self.finds_nothing:
            return 0
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

    def reach(self, path: Sequence[Segment]) -> Reach:
        """What an estimated cache has of `path`."""
        total, known, at_seam, is_whole = 0, 0, [0, 0, 0], True  # at_seam: the total at the last seam of each kind
        for node, blocks in path:
            holding = node.holding_of(self.engine_id)
            if holding is None:
                break
            known += blocks
            if is_whole:
                staying = blocks if holding.bookings else min(blocks, holding.resident_blocks)
                total += staying
                is_whole = staying == len(node.hashes)
                ends = holding.seam if is_whole else 0
                at_seam[: ends + 1] = [total] * (ends + 1)
        return Reach(at_seam[0], at_seam[1], at_seam[2], known)

    def mark(self, leaf: Node, blocks: int, seam: int, end_blocks: int) -> None:
        """Set the `Holding.seam` of the nodes up to `leaf` that end in the first `blocks`, which were in the cache.

        Those up to `end_blocks` were not.
        """
        for node in leaf.path():
            holding = node.holding_of(self.engine_id)
            if holding is not None and node.end_blocks <= blocks:
                holding.seam = max(holding.seam, seam)
            elif holding is not None and node.end_blocks <= end_blocks:
                holding.seam = 0

    def book(self, leaf: Node, *, waits: bool = False) -> None:
        """A call whose prompt ends at `leaf` was booked: a booking and a sharer of each node of the path.

        A call that `waits` in the gateway has not been sent; `send` follows.
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
        if self.lower is not None:
            self.lower.book(leaf, waits=waits)

    def join(self, leaf: Node) -> int:
        """Another gateway's call was sent here: a booking of each node of the path, and no sharer.

        Returns the call's `ready_blocks` before this booking, in the last tier.
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
        return total if self.lower is None else self.lower.join(leaf)

    def send(self, leaf: Node) -> None:
        """A call that waited in the gateway was sent: the engine will compute its blocks."""
        if self.lower is not None:
            self.lower.send(leaf)
        for node in leaf.path():
            holding = node.holding_of(self.engine_id)
            assert holding is not None
            holding.waiting -= 1

    def ready_blocks(self, leaf: Node) -> int:
        """The leading blocks up to `leaf` that are resident, or that sent calls compute. A call is booked at `leaf`."""
        total, node, engine_id = 0, leaf, self.engine_id
        while node.parent is not None:  # a hot loop: for each call that is sent, it runs for many that wait
            holding, blocks = node.first, len(node.hashes)
            if holding is None or holding.engine_id != engine_id:
                holding = node.others[engine_id]
            staying = holding.resident_blocks - holding.leaving_blocks
            total = total + blocks if holding.bookings > holding.waiting or staying == blocks else staying
            node = node.parent
        return total

    def touch(self, leaf: Node) -> None:
        """The prefix that ends at `leaf` was used now."""
        self._order.touch_path(leaf)
        if self.lower is not None:
            self.lower.touch(leaf)

    def unbook(self, leaf: Node, *, waits: bool = False) -> None:
        """The call's blocks are no longer expected; resident ones stay. A call that `waits` was never sent."""
        if self.lower is not None:
            self.lower.unbook(leaf, waits=waits)
        node, engine_id = leaf, self.engine_id
        while (parent := node.parent) is not None:
            holding = node.first
            if holding is None or holding.engine_id != engine_id:
                holding = node.others[engine_id]
            holding.bookings -= 1
            holding.waiting -= waits
            if not holding.bookings:
                holding.expected_ends = 0
                if holding.resident_blocks:
                    self._order.unbooked(holding)
                else:
                    node.drop_unused(holding)
            node = parent
        self._tree.prune(leaf)

    def unshare(self, leaf: Node) -> None:
        """The call left the window H."""
        if self.lower is not None:
            self.lower.unshare(leaf)
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
        """What LRU would evict next to free `blocks`. Booked nodes and nodes in `keep` stay."""
        for holding in self._order.free():
            if blocks <= 0:
                return
            if holding.node in keep:
                continue
            taken = min(blocks, holding.resident_blocks - holding.leaving_blocks)
            blocks -= taken
            yield holding.node, taken

    def expect_eviction(self, blocks: int) -> list[Victim]:
        """A booked call needs `blocks` more than are free. The blocks that LRU will evict no longer count as cached."""
        victims = [victim for victim in self.victims(blocks) if victim[1]]
        for node, taken in victims:
            node.holding(self.engine_id).leaving_blocks += taken
        return victims

    def end_expectation(self, victims: Sequence[Victim]) -> None:
        """The call's prompt is computed, or the call has ended. `victims` that are still resident count as cached."""
        for victim, taken in victims:
            rest = taken
            for node in victim.path():  # a split since may have moved some of the blocks to a new ancestor
                holding = node.holding_of(self.engine_id)
                spared = min(rest, holding.leaving_blocks) if holding is not None else 0
                if holding is not None:
                    holding.leaving_blocks -= spared
                rest -= spared
                if rest == 0:
                    break

    def assume_stored(self, leaf: Node, *, is_booked: bool) -> None:
        """For an engine that does not report: takes the prefix up to `leaf` as stored, and others as evicted for it.

        `is_booked`: a call was booked at `leaf`, and has ended.
        """
        if self.lower is not None:
            self.lower.assume_stored(leaf, is_booked=is_booked)
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
        """For an engine that does not report: takes `blocks` as evicted, in LRU order."""
        for node, taken in self.victims(blocks):
            self.resident.evict(node, taken)
