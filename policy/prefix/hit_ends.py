"""Where a prefix hit can end on one engine whose layers with windows or states keep what a hit needs at some places.

In: the engine's reports (`apply`), and the ends that booked calls will leave (`expect`), by the engine's rule. Out: the
deepest end on a prompt's path (`hit`). The ends are bits of `Holding.ends` and `Holding.expected_ends`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from plait.policy.prefix.prefix_tree import Node, Segment, path_to
from plait.policy.prefix.resident_blocks import BlockFinder

ALL: Final = 1 << 60
"""More blocks than any prompt has."""

LEAST_PLACES: Final = 1_024
"""Up to so many known places of ends, none is dropped."""


class EndRule(NamedTuple):
    """Where a call leaves ends: at each multiple of `interval_tokens` (0: none), at the last multiple of `align_tokens`
    before its prompt's last token, and where it left a longer prefix that it shares with others.
    """

    align_tokens: int
    interval_tokens: int

    def left_by(self, prompt_tokens: int, shared_tokens: int, block_tokens: int) -> int:
        """The ends of a call that shares `shared_tokens` with others: bit n is the end after n + 1 tree blocks."""
        align, interval, most_tokens = self.align_tokens, self.interval_tokens, prompt_tokens - 1
        ends = {most_tokens // align * align, min(shared_tokens, most_tokens) // align * align}
        if interval:
            ends.update(range(interval, prompt_tokens + 1, interval))
        bits = 0
        for blocks in {end // block_tokens for end in ends} - {0}:
            bits |= 1 << (blocks - 1)
        return bits


class Hit(NamedTuple):
    """`blocks` of a prompt can be hit, of the `leading` ones that full attention has."""

    blocks: int
    leading: int


class HitEnds:
    def __init__(self, engine_id: str, rule: EndRule) -> None:
        self.rule: Final = rule
        self._engine_id = engine_id
        self._expected: list[tuple[Node, int, Callable[[], float]]] = []
        self._places: dict[int, Node] = {}
        """By the block of an end, a node that has or had it. Splits and merges since have moved it to an ancestor."""
        self._most_places = LEAST_PLACES

    def hit(self, path: Sequence[Segment], most_blocks: int = ALL, *, sent: bool = False) -> Hit:
        """What of `path` is in the cache or expected. With `sent`, calls that wait in the gateway compute nothing."""
        total = hit = 0
        for node, blocks in path:
            holding = node.holding_of(self._engine_id)
            if holding is None:
                break
            ends, staying = holding.ends, min(blocks, holding.resident_blocks - holding.leaving_blocks)
            if holding.bookings > (holding.waiting if sent else 0):
                ends, staying = ends | holding.expected_ends, blocks
            within = ends & ((1 << min(staying, most_blocks - total)) - 1) if most_blocks > total else 0
            if within:
                hit = total + within.bit_length()
            total += staying
            if staying < blocks:
                break
        return Hit(hit, total)

    def apply(self, opened: Iterable[tuple[int, int]], closed: Iterable[int], finder: BlockFinder) -> None:
        """Apply a report, after its blocks: `opened` has (last block, consecutive blocks), `closed` single blocks."""
        for block in closed:
            node, offset = self._find(block, finder)
            holding = None if node is None else node.holding_of(self._engine_id)
            if holding is not None:
                holding.ends &= ~(1 << offset)
        for last, blocks in opened:
            node, offset = self._find(last, finder)
            left = blocks
            while node is not None and node.parent is not None and left:
                count = min(left, offset + 1)
                holding = node.holding_of(self._engine_id)
                if holding is None or holding.resident_blocks <= offset:
                    break
                first = offset + 1 - count
                holding.ends |= ((1 << count) - 1) << first
                self._places.update(dict.fromkeys(node.hashes[first : offset + 1], node))
                node, left = node.parent, left - count
                offset = len(node.hashes) - 1
        if len(self._places) > self._most_places:
            self._drop_places()

    def left_by(self, leaf: Node, prompt_tokens: int, block_tokens: int) -> int:
        """As `EndRule.left_by`, of a call whose prompt ends at `leaf` and that is not booked yet."""
        return self.rule.left_by(prompt_tokens, self.hit(path_to(leaf)).leading * block_tokens, block_tokens)

    def expect(self, leaf: Node, bits: int, computed_s: Callable[[], float]) -> None:
        """A call was booked at `leaf`, and will leave the ends `bits`.

        `computed_s` tells when its prompt was computed; infinite: not yet; -inf: it will not be.
        """
        self._expected.append((leaf, bits, computed_s))
        for node in leaf.path():
            own = bits >> node.start_blocks & ((1 << len(node.hashes)) - 1)
            holding = node.holding_of(self._engine_id) if own else None
            if holding is not None and holding.bookings:
                holding.expected_ends |= own
                self._places.update((block, node) for place, block in enumerate(node.hashes) if own >> place & 1)

    def confirm(self, requested_s: float) -> None:
        """A report was applied that was requested then: expect only the ends of prompts computed since."""
        expected, self._expected = self._expected, []
        for leaf, _, _ in expected:
            for node in leaf.path():
                holding = node.holding_of(self._engine_id)
                if holding is not None:
                    holding.expected_ends = 0
        for leaf, bits, computed_s in expected:
            if computed_s() > requested_s:
                self.expect(leaf, bits, computed_s)

    def _find(self, block: int, finder: BlockFinder) -> tuple[Node | None, int]:
        """(node, position in it) of a block with or without an end."""
        node = self._places.get(block)
        while node is not None:
            if block in node.hashes and node.holding_of(self._engine_id) is not None:  # else it has left the tree
                return node, node.hashes.index(block)
            node = node.parent
        return finder.find(block) or (None, 0)

    def _drop_places(self) -> None:
        """Forget the places of blocks that are no ends any more."""
        known, self._places = self._places, {}
        for block, at in known.items():
            for node in at.path():
                if block in node.hashes:
                    holding = node.holding_of(self._engine_id)
                    ends = 0 if holding is None else holding.ends | holding.expected_ends
                    if ends >> node.hashes.index(block) & 1:
                        self._places[block] = node
                    break
        self._most_places = max(LEAST_PLACES, 2 * len(self._places))
