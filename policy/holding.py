"""What one engine has of one prefix-tree node, and its place in that engine's order of last use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policy.prefix_tree import Node


class Holding:
    """One engine's share in one node, counted in blocks from the node's start; a link of that engine's `UseOrder`.

    `resident_blocks` is what the engine reported; `bookings` counts calls on their way or just ended, whose blocks are
    expected (a call always spans whole nodes); `sharers` counts calls placed there within the window H. Of the resident
    blocks, the last `leaving_blocks` are expected to be evicted for a call that is on its way.
    """

    __slots__ = ("bookings", "leaving_blocks", "newer", "node", "older", "resident_blocks", "sharers")

    def __init__(self, node: Node, resident_blocks: int = 0, bookings: int = 0, sharers: int = 0) -> None:
        self.node = node
        self.resident_blocks = resident_blocks
        self.bookings = bookings
        self.sharers = sharers
        self.leaving_blocks = 0
        self.older: Holding | None = None
        self.newer: Holding | None = None

    def __bool__(self) -> bool:
        return self.held or self.sharers > 0

    def __repr__(self) -> str:
        return f"Holding(resident={self.resident_blocks}, bookings={self.bookings}, sharers={self.sharers})"

    @property
    def held(self) -> bool:
        """Whether the engine has or expects anything of the node: then, and only then, it is in the order of use."""
        return self.resident_blocks > 0 or self.bookings > 0

    @property
    def staying_blocks(self) -> int:
        """Resident blocks that no call on its way is expected to push out."""
        return self.resident_blocks - self.leaving_blocks

    def needed_blocks(self) -> int:
        """Leading blocks of the node that must stay in the tree on this engine's account."""
        return len(self.node) if self.bookings or self.sharers else self.resident_blocks

    def split(self, upper: Node, blocks: int) -> Holding:
        """The holding of `upper`, which takes over the node's first `blocks` blocks and was used as lately."""
        above = Holding(upper, min(blocks, self.resident_blocks), self.bookings, self.sharers)
        self.resident_blocks = max(0, self.resident_blocks - blocks)
        above.leaving_blocks = max(0, self.leaving_blocks - self.resident_blocks)
        self.leaving_blocks -= above.leaving_blocks
        if self.newer is not None:
            above.link_between(self, self.newer)
        return above

    def link_between(self, older: Holding, newer: Holding) -> None:
        """Enter an order of use between two neighbours."""
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def unlink(self) -> None:
        """Leave the order of use, if in one."""
        if self.older is not None and self.newer is not None:
            self.older.newer, self.newer.older = self.newer, self.older
            self.older = self.newer = None

    def check(self, node: Node) -> None:
        """Assert the invariants; for tests."""
        assert self.node is node
        assert self, f"an empty holding was left on {node}"
        assert 0 <= self.resident_blocks <= len(node)
        assert 0 <= self.leaving_blocks <= self.resident_blocks
        assert self.bookings >= 0
        assert self.sharers >= 0
        assert self.held == (self.newer is not None) == (self.older is not None), f"{node}: in the order of use or not?"


class UseOrder:
    """An engine's holdings from the least to the most lately used, as a ring through a sentinel; all steps O(1)."""

    def __init__(self, sentinel_node: Node) -> None:
        self._ring = Holding(sentinel_node)
        self._ring.older = self._ring.newer = self._ring

    def __iter__(self) -> Iterator[Holding]:
        """Oldest first; the current holding may be unlinked meanwhile."""
        holding = self._ring.newer
        while holding is not None and holding is not self._ring:
            following = holding.newer
            yield holding
            holding = following

    def touch(self, holding: Holding) -> None:
        """Make `holding` the most lately used."""
        holding.unlink()
        assert self._ring.older is not None
        holding.link_between(self._ring.older, self._ring)
