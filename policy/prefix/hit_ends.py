"""Where a prefix hit can end on one engine whose layers with windows or states keep what a hit needs at some places.

In: the engine's reports (`apply`), and the ends that booked calls will leave (`expect`), by the engine's rule. Out: the
deepest end on a prompt's path (`hit`). A bit of `Holding.ends` or `Holding.expected_ends` says that an end is after a
tree block or inside the next one. An end inside a block is named by the `whole_hash` of all tokens before it.

Placement counts on all leading blocks: where a call finds a prefix without an end, it leaves one. With the hits of the
moment, calls that share documents spread over engines, and mean E2E was 1.35 times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

from plait.policy.prefix.block_hash import whole_hash
from plait.policy.prefix.prefix_tree import Holding, Node, Segment
from plait.policy.prefix.resident_blocks import BlockFinder

MOST_NAMES: Final = 65_536
"""More prompts than an engine keeps: further ends inside blocks are left out."""

LEAST_PLACES: Final = 8_192
"""Up to so many known places of ends, none is forgotten."""


class EndRule(NamedTuple):
    """Where a call leaves ends: at each multiple of `interval_tokens` (0: none), at the last multiple of `align_tokens`
    before its prompt's last token, and where it left a longer prefix that it shares with others.
    """

    align_tokens: int
    interval_tokens: int
    block_tokens: int
    """The size of a tree block."""

    def left_by(self, prompt_tokens: int, shared_tokens: int) -> set[int]:
        """The ends of a call that shares so much of its prompt with others, in tokens. Dense ones are left out."""
        align, interval, most_tokens = self.align_tokens, self.interval_tokens, prompt_tokens - 1
        ends = {most_tokens // align * align, min(shared_tokens, most_tokens) // align * align}
        if interval and not self.is_dense:
            ends.update(range(interval, prompt_tokens + 1, interval))
        return ends

    @property
    def is_dense(self) -> bool:
        """Whether there is an end in each tree block. Then none is told inside one, and booked calls leave all."""
        return 0 < self.interval_tokens <= self.block_tokens


class Hit(NamedTuple):
    """`tokens` of a prompt can be hit, of the `leading_tokens` in whole tree blocks that full attention has."""

    tokens: int
    leading_tokens: int


class _Names:
    """The ends inside tree blocks: by the block before, the tokens into the next block by name.

    A block that also has an end after itself has its own hash among the names, with 0 tokens.
    """

    def __init__(self) -> None:
        self.by_block: dict[int, dict[int, int]] = {}
        self.before: dict[int, int] = {}
        """By name, the tree block before."""

    def add(self, block: int, name: int, tokens: int, *, is_end: bool) -> None:
        """Add an end inside the block after `block`. `is_end`: there is one after `block` itself."""
        names = self.by_block.get(block)
        if names is None:
            names = self.by_block[block] = {block: 0} if is_end else {}
        names[name] = tokens
        self.before[name] = block

    def remove(self, name: int) -> bool:
        """Remove an end inside a block. Returns whether the block before has no end left."""
        block = self.before.pop(name)
        names = self.by_block[block]
        del names[name]
        if not names or names.keys() == {block}:
            del self.by_block[block]
        return not names

    def opened(self, block: int) -> None:
        """Add the end after the block."""
        if block in self.by_block:
            self.by_block[block][block] = 0

    def closed(self, block: int) -> bool:
        """Remove the end after the block. Returns whether there is none inside the next one."""
        names = self.by_block.get(block)
        if names is not None:
            names.pop(block, None)
        return not names

    def deepest(self, block: int, end: int, prompt_tokens: int, tokens: Sequence[int]) -> int:
        """The last end, in tokens, of a prompt at or behind its block with this hash, which ends at `end`; 0: none."""
        names = self.by_block.get(block)
        if names is None:
            return end
        inner = [
            more
            for more in set(names.values())
            if not more
            or (
                end + more < prompt_tokens
                and (not len(tokens) or names.get(whole_hash(tokens[end : end + more], block)) == more)
            )
        ]
        return end + max(inner) if inner else 0


class HitEnds:
    def __init__(self, engine_id: str, rule: EndRule) -> None:
        self.rule: Final = rule
        self._engine_id = engine_id
        self._expected: list[tuple[Sequence[tuple[int, int | None]], Callable[[], float]]] = []
        """Of each booked call: (tree block before, name of an end inside the next one), and when it was computed."""
        self._counts: Counter[tuple[int, int | None]] = Counter()
        self._told, self._coming = _Names(), _Names()
        self._places: dict[int, tuple[Node, int]] = {}
        """By block: a node that has or had it, and its place in the prompt. Splits and merges move it to ancestors."""
        self._most_places = LEAST_PLACES

    def hit(
        self, path: Sequence[Segment], prompt_tokens: int, tokens: Sequence[int] = (), *, sent: bool = False
    ) -> Hit:
        """What of a prompt is in the cache or expected. With `sent`, calls that wait in the gateway compute nothing.

        `path` is the prompt's in the tree. Without its `tokens`, an end inside a block counts for each prompt that has
        the block before.
        """
        block_tokens, most_blocks = self.rule.block_tokens, (prompt_tokens - 1) // self.rule.block_tokens
        total, found = 0, list[tuple[Node, int, int]]()  # of each node: the ends told, and those expected
        for node, blocks in path:
            holding = node.holding_of(self._engine_id)
            if holding is None:
                break
            coming, staying = 0, min(blocks, holding.resident_blocks - holding.leaving_blocks)
            if holding.bookings > (holding.waiting if sent else 0):
                coming, staying = -1 if self.rule.is_dense else holding.expected_ends, blocks
            within = (1 << max(0, min(staying, most_blocks - total))) - 1
            if (holding.ends | coming) & within:
                found.append((node, holding.ends & within, coming & within))
            total += staying
            if staying < blocks:
                break
        for node, told, coming in reversed(found):
            left = told | coming
            while left:
                place = left.bit_length() - 1
                bit = 1 << place
                block, end = node.hashes[place], (node.start_blocks + place + 1) * block_tokens
                told_tokens = self._told.deepest(block, end, prompt_tokens, tokens) if told & bit else 0
                coming_tokens = self._coming.deepest(block, end, prompt_tokens, tokens) if coming & bit else 0
                if told_tokens or coming_tokens:
                    return Hit(max(told_tokens, coming_tokens), total * block_tokens)
                left ^= bit
        return Hit(0, total * block_tokens)

    def apply(
        self,
        opened: Iterable[tuple[int, int]],
        inside: Iterable[tuple[int, int, int]],
        closed: Iterable[int],
        finder: BlockFinder,
    ) -> None:
        """Apply a report, after its blocks.

        `opened` has (last block, consecutive blocks); `inside` (block before, tokens after it, name); `closed` blocks
        and names.
        """
        for name in closed:
            block = self._told.before.get(name, name)
            if self._told.remove(name) if block != name else self._told.closed(name):
                self._mark(block, finder, is_end=False)
        for last, blocks in opened:
            self._open(last, blocks, finder)
        for before, tokens, name in inside:
            holding, bit = self._mark(before, finder, is_end=None)
            if holding is not None and len(self._told.before) < MOST_NAMES:
                self._told.add(before, name, tokens, is_end=bool(holding.ends & bit))
                holding.ends |= bit
        if len(self._places) > self._most_places:
            self._places = {block: self._places[block] for block in self._places if self._is_end(block)}
            self._most_places = max(LEAST_PLACES, 2 * len(self._places))

    def clear(self) -> None:
        """No block is resident until it is reported again. Booked calls still leave their ends."""
        self._told = _Names()

    def expect(self, leaf: Node, ends: Collection[int], tokens: Sequence[int], computed_s: Callable[[], float]) -> None:
        """A call was booked at `leaf`, and will leave `ends`. Without its `tokens`, all count as after a block.

        `computed_s` tells when its prompt was computed; infinite: not yet; -inf: it will not be.
        """
        if self.rule.is_dense:
            return
        left = list[tuple[int, int | None]]()
        node, bottom_up = leaf, sorted(ends, reverse=True)
        for end in bottom_up:
            blocks, rest = divmod(end, self.rule.block_tokens)
            while node.start_blocks >= blocks > 0 and node.parent is not None:
                node = node.parent
            holding = node.holding_of(self._engine_id) if blocks else None
            if holding is None or not holding.bookings:
                continue
            place = blocks - node.start_blocks - 1
            block, name = node.hashes[place], None
            if rest and len(tokens):
                name = whole_hash(tokens[end - rest : end], block)
                is_end = bool(holding.expected_ends >> place & 1)
                self._coming.add(block, name, rest, is_end=is_end)
            else:
                self._coming.opened(block)
            holding.expected_ends |= 1 << place
            self._places[block] = node, blocks - 1
            self._counts[block, name] += 1
            left.append((block, name))
        self._expected.append((left, computed_s))

    def confirm(self, requested_s: float) -> None:
        """A report was applied that was requested then: expect only the ends of prompts computed since."""
        expected, self._expected = self._expected, []
        for one in expected:
            left, computed_s = one
            if computed_s() > requested_s:
                self._expected.append(one)
                continue
            for block, name in left:
                self._counts[block, name] -= 1
                if self._counts[block, name]:
                    continue
                del self._counts[block, name]
                if self._coming.closed(block) if name is None else self._coming.remove(name):
                    node, place = self._known(block)
                    holding = None if node is None else node.holding_of(self._engine_id)
                    if holding is not None:
                        holding.expected_ends &= ~(1 << place)

    def _open(self, last: int, blocks: int, finder: BlockFinder) -> None:
        """A hit can end after each of these consecutive blocks."""
        node, offset = self._find(last, finder)
        if node is not None and blocks == 1:  # places of more would be many; their closing is rare
            self._places[last] = node, node.start_blocks + offset
        while node is not None and node.parent is not None and blocks:
            count = min(blocks, offset + 1)
            holding = node.holding_of(self._engine_id)
            if holding is None or holding.resident_blocks <= offset:
                break
            first = offset + 1 - count
            holding.ends |= ((1 << count) - 1) << first
            if self._told.by_block:
                for block in node.hashes[first : offset + 1]:
                    self._told.opened(block)
            node, blocks = node.parent, blocks - count
            offset = len(node.hashes) - 1

    def _mark(self, block: int, finder: BlockFinder, *, is_end: bool | None) -> tuple[Holding | None, int]:
        """(holding, bit) of a resident block; with `is_end`, set or clear the bit."""
        node, place = self._find(block, finder)
        holding = None if node is None else node.holding_of(self._engine_id)
        if node is None or holding is None or holding.resident_blocks <= place:
            return None, 0
        if is_end is False:
            holding.ends &= ~(1 << place)
        else:
            self._places[block] = node, node.start_blocks + place
        return holding, 1 << place

    def _find(self, block: int, finder: BlockFinder) -> tuple[Node | None, int]:
        """(node, position in it) of a resident block; node None: it is not resident."""
        node, place = self._known(block)
        return (node, place) if node is not None else finder.find(block) or (None, 0)

    def _is_end(self, block: int) -> bool:
        node, place = self._known(block)
        holding = None if node is None else node.holding_of(self._engine_id)
        return holding is not None and bool((holding.ends | holding.expected_ends) >> place & 1)

    def _known(self, block: int) -> tuple[Node | None, int]:
        """As `_find`, of a block with a known place."""
        node, index = self._places.get(block, (None, 0))
        while node is not None:
            place = index - node.start_blocks
            if 0 <= place < len(node.hashes) and node.hashes[place] == block and node.holding_of(self._engine_id):
                return node, place
            node = node.parent
        return None, 0
