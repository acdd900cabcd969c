"""A node of the prefix tree, and its holdings: the blocks that each engine has of the node.

Both classes are here because a node refers to its holdings and a holding to its node.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from math import exp

from plait.policy.prefix.small_mapping import EMPTY, with_entry, without_entry

USES_S = 60.0
"""How long a use of a prefix counts: about as long ahead as the next uses can be foreseen."""


class Node:
    """A run of blocks; `start_blocks` blocks of the prompt come before it.

    `children` are by their first block, `holdings` by their engine. Most nodes have few of both. `use_count` is how
    often it was used when that was at `used_s`.
    """

    __slots__ = ("children", "hashes", "holdings", "parent", "start_blocks", "use_count", "used_s")

    def __init__(self, parent: Node | None, start_blocks: int, hashes: array[int]) -> None:
        self.parent = parent
        self.start_blocks = start_blocks
        self.hashes = hashes
        self.children: Mapping[int, Node] = EMPTY
        self.holdings: Mapping[str, Holding] = EMPTY
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

    def holding(self, engine_id: str) -> Holding:
        """The engine's holding, made if absent; `drop_unused` removes it once it is empty."""
        holding = self.holdings.get(engine_id)
        if holding is None:
            holding = Holding(self)
            self.holdings = with_entry(self.holdings, engine_id, holding)
        return holding

    def drop_unused(self, engine_id: str) -> None:
        """Forget the engine's holding if it is empty. A holding that only has sharers leaves the order of use."""
        holding = self.holdings[engine_id]
        if not holding.held:
            holding.unlink()
            if not holding:
                self.holdings = without_entry(self.holdings, engine_id)

    def held_blocks(self, engine_id: str) -> int:
        """Leading blocks of this node that are resident on the engine or expected there."""
        holding = self.holdings.get(engine_id)
        if holding is None:
            return 0
        return len(self.hashes) if holding.bookings else holding.staying_blocks

    def can_join(self, lower: Node) -> bool:
        """Whether nothing divides this node from `lower`, its only child: no call ends between them on any engine.

        Every engine has the blocks of both in use since the same time, so the order of eviction stays the same.
        """
        return all(holding.can_join(lower.holdings.get(engine_id)) for engine_id, holding in self.holdings.items())

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

    def use(self, now_s: float) -> None:
        """A call that ends with the node was placed, on any engine."""
        for node in self.path():
            node.use_count, node.used_s = 1.0 + node.uses(now_s), now_s

    def uses(self, now_s: float) -> float:
        """The calls that span the node, each of which counts less with time: those of about the last `USES_S`."""
        return self.use_count * exp((self.used_s - now_s) / USES_S) if self.use_count else 0.0

    def path(self) -> Iterator[Node]:
        """The node itself, then its ancestors up to the root, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Holding:
    """One engine's leading blocks of one node; also a link in that engine's order of use.

    `resident_blocks` were reported, or assumed to be stored. `bookings` counts booked calls, also those that no
    report has confirmed since they ended. Their blocks are expected: all blocks of the node, since a call spans whole
    nodes. `waiting` of them are of calls that wait in the gateway. `sharers` counts the calls placed there within the
    window H. Of two holdings, the one with the higher `used` was used later. The last `leaving_blocks` of the resident
    blocks are expected to be evicted for booked calls.
    """

    __slots__ = (
        *("bookings", "leaving_blocks", "newer", "node", "older", "resident_blocks", "sharers", "used", "waiting"),
    )

    def __init__(self, node: Node, resident_blocks: int = 0, bookings: int = 0, sharers: int = 0) -> None:
        self.node = node
        self.resident_blocks = resident_blocks
        self.bookings = bookings
        self.sharers = sharers
        self.waiting = 0
        self.used = 0
        self.leaving_blocks = 0
        self.older: Holding | None = None
        self.newer: Holding | None = None

    def __bool__(self) -> bool:
        return self.held or self.sharers > 0

    def __repr__(self) -> str:
        return f"Holding(resident={self.resident_blocks}, bookings={self.bookings}, sharers={self.sharers})"

    @property
    def held(self) -> bool:
        """Whether blocks of the node are resident or expected. Only then the holding is in the order of use."""
        return self.resident_blocks > 0 or self.bookings > 0

    @property
    def staying_blocks(self) -> int:
        """Resident blocks that are not expected to be evicted for a booked call."""
        return self.resident_blocks - self.leaving_blocks

    def needed_blocks(self) -> int:
        """Leading blocks of the node that must stay in the tree because of this engine."""
        return len(self.node.hashes) if self.bookings or self.sharers else self.resident_blocks

    def split(self, upper: Node, blocks: int) -> Holding:
        """The holding of `upper`, which takes over the node's first `blocks` blocks. It follows in the order of use."""
        above = Holding(upper, min(blocks, self.resident_blocks), self.bookings, self.sharers)
        above.waiting, above.used = self.waiting, self.used
        self.resident_blocks = max(0, self.resident_blocks - blocks)
        above.leaving_blocks = max(0, self.leaving_blocks - self.resident_blocks)
        self.leaving_blocks -= above.leaving_blocks
        if self.newer is not None:
            above.link_between(self, self.newer)
        return above

    def can_join(self, below: Holding | None) -> bool:
        """Whether one holding can stand for this one and `below`, the engine's holding of the node's only child.

        The same calls span both, and no other node is between them in the order of use. Blocks that are expected to be
        evicted must be behind the blocks that stay.
        """
        if self.leaving_blocks:
            return False
        if below is None:
            return not self.bookings and not self.sharers
        calls, calls_below = (self.bookings, self.sharers, self.waiting), (below.bookings, below.sharers, below.waiting)
        return calls == calls_below and (not below.held or self.older is below)

    def join(self, above: Holding) -> None:
        """Take over the blocks of `above`, the upper part of the node, and its place in the order of use."""
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

    def check(self, node: Node) -> None:
        """Assert the invariants; for tests."""
        assert self.node is node
        assert self, f"an empty holding was left on {node}"
        assert 0 <= self.resident_blocks <= len(node)
        assert 0 <= self.leaving_blocks <= self.resident_blocks
        assert 0 <= self.waiting <= self.bookings
        assert self.sharers >= 0
        assert self.held == (self.newer is not None) == (self.older is not None), f"{node}: in the order of use or not?"
