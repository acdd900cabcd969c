"""Where a prefix hit can end on one engine whose layers with windows or states keep what a hit needs at some places.

In: the engine's reports (`apply`), and the ends that booked calls will leave (`expect`), by the engine's rule. Out: the
deepest end on a prompt's path (`hit`). Ends after a tree block are bits of `Holding.ends` and `Holding.expected_ends`.
An end inside a tree block is named by the `whole_hash` of all tokens before it.

Placement counts on all leading blocks: where a call finds a prefix without an end, it leaves one. With the hits of the
moment, calls that share documents spread over engines, and mean E2E was 1.35 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from plait.policy.prefix.block_hash import whole_hash
from plait.policy.prefix.prefix_tree import Node, Segment
from plait.policy.prefix.resident_blocks import BlockFinder

LEAST_PLACES: Final = 1_024
"""Up to so many known places of ends, none is dropped."""

MOST_INSIDE: Final = 65_536
"""More prompts than an engine keeps: with more ends inside blocks, all are forgotten."""


class EndRule(NamedTuple):
    """Where a call leaves ends: at each multiple of `interval_tokens` (0: none), at the last multiple of `align_tokens`
    before its prompt's last token, and where it left a longer prefix that it shares with others.
    """

    align_tokens: int
    interval_tokens: int
    block_tokens: int
    """The size of a tree block."""

    def left_by(self, prompt_tokens: int, shared_tokens: int) -> set[int]:
        """The ends of a call that shares so much of its prompt with others, in tokens."""
        align, interval, most_tokens = self.align_tokens, self.interval_tokens, prompt_tokens - 1
        ends = {most_tokens // align * align, min(shared_tokens, most_tokens) // align * align}
        if interval:
            ends.update(range(interval, prompt_tokens + 1, interval))
        return ends


class Hit(NamedTuple):
    """`tokens` of a prompt can be hit, of the `leading_tokens` in whole tree blocks that full attention has."""

    tokens: int
    leading_tokens: int


class _Expected(NamedTuple):
    """The ends that a call booked at `leaf` will leave: bits, and by the tree block before them those inside blocks."""

    leaf: Node
    bits: int
    inside: Mapping[int, tuple[int, int]]
    computed_s: Callable[[], float]


class HitEnds:
    def __init__(self, engine_id: str, rule: EndRule) -> None:
        self.rule: Final = rule
        self._engine_id = engine_id
        self._expected: list[_Expected] = []
        self._inside: dict[int, dict[int, int]] = {}
        """By the tree block before them: the ends inside the next block, by name, and how many tokens into it."""
        self._coming: dict[int, dict[int, int]] = {}
        """As `_inside`, of the expected ones."""
        self._before: dict[int, int] = {}
        """The tree block before each end in `_inside`."""
        self._places: dict[int, Node] = {}
        """By the block of an end, a node that has or had it. Splits and merges since have moved it to an ancestor."""
        self._most_places = LEAST_PLACES

    def hit(
        self, path: Sequence[Segment], prompt_tokens: int, tokens: Sequence[int] = (), *, sent: bool = False
    ) -> Hit:
        """What of a prompt is in the cache or expected. With `sent`, calls that wait in the gateway compute nothing.

        `path` is the prompt's in the tree. Without its `tokens`, an end inside a block counts for each prompt that has
        the block before.
        """
        block_tokens, most_blocks = self.rule.block_tokens, (prompt_tokens - 1) // self.rule.block_tokens
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
        inner_tokens = self._inner(path, hit, total, prompt_tokens, tokens)
        return Hit(max(hit * block_tokens, inner_tokens), total * block_tokens)

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
            before = self._before.pop(name, None)
            if before is not None:
                del self._inside[before][name]
                if not self._inside[before]:
                    del self._inside[before]
                continue
            node, offset = self._find(name, finder)
            holding = None if node is None else node.holding_of(self._engine_id)
            if holding is not None:
                holding.ends &= ~(1 << offset)
        for last, blocks in opened:
            self._open(last, blocks, finder)
        for before, tokens, name in inside:
            self._inside.setdefault(before, {})[name] = tokens
            self._before[name] = before
        if len(self._before) > MOST_INSIDE:
            self._inside.clear()
            self._before.clear()
        if len(self._places) > self._most_places:
            self._drop_places()

    def clear(self) -> None:
        """No block is resident until it is reported again."""
        self._inside.clear()
        self._before.clear()
        self._places.clear()

    def expect(self, leaf: Node, ends: Collection[int], tokens: Sequence[int], computed_s: Callable[[], float]) -> None:
        """A call was booked at `leaf`, and will leave `ends`. Without its `tokens`, all count as after a block.

        `computed_s` tells when its prompt was computed; infinite: not yet; -inf: it will not be.
        """
        bits, inside = 0, dict[int, tuple[int, int]]()
        for end in ends:
            blocks, rest = divmod(end, self.rule.block_tokens)
            if not blocks:
                continue
            if rest and len(tokens):
                before = next(n.hashes[blocks - n.start_blocks - 1] for n in leaf.path() if n.start_blocks < blocks)
                inside[before] = whole_hash(tokens[end - rest : end], before), rest
            else:
                bits |= 1 << (blocks - 1)
        self._expect(_Expected(leaf, bits, inside, computed_s))

    def confirm(self, requested_s: float) -> None:
        """A report was applied that was requested then: expect only the ends of prompts computed since."""
        expected, self._expected = self._expected, []
        self._coming.clear()
        for one in expected:
            for node in one.leaf.path():
                holding = node.holding_of(self._engine_id)
                if holding is not None:
                    holding.expected_ends = 0
        for one in expected:
            if one.computed_s() > requested_s:
                self._expect(one)

    def _expect(self, one: _Expected) -> None:
        self._expected.append(one)
        for before, (name, tokens) in one.inside.items():
            self._coming.setdefault(before, {})[name] = tokens
        for node in one.leaf.path() if one.bits else ():
            own = one.bits >> node.start_blocks & ((1 << len(node.hashes)) - 1)
            holding = node.holding_of(self._engine_id) if own else None
            if holding is not None and holding.bookings:
                holding.expected_ends |= own
                self._places.update((block, node) for place, block in enumerate(node.hashes) if own >> place & 1)

    def _inner(self, path: Sequence[Segment], hit: int, total: int, prompt_tokens: int, tokens: Sequence[int]) -> int:
        """The tokens up to the deepest end inside a block, from the first `hit` blocks to `total`; 0: there is none."""
        if not self._inside and not self._coming:
            return 0
        for node, blocks in reversed(path):
            for place in range(min(blocks, total - node.start_blocks) - 1, -1, -1):
                after, before = node.start_blocks + place + 1, node.hashes[place]
                if after < hit:
                    return 0
                start = after * self.rule.block_tokens
                found = [
                    start + inner
                    for known in (self._inside, self._coming)
                    for inner in set(known.get(before, {}).values())
                    if start + inner < prompt_tokens
                    and (not len(tokens) or whole_hash(tokens[start : start + inner], before) in known[before])
                ]
                if found:
                    return max(found)
        return 0

    def _open(self, last: int, blocks: int, finder: BlockFinder) -> None:
        """A hit can end after each of these consecutive blocks."""
        node, offset = self._find(last, finder)
        while node is not None and node.parent is not None and blocks:
            count = min(blocks, offset + 1)
            holding = node.holding_of(self._engine_id)
            if holding is None or holding.resident_blocks <= offset:
                break
            first = offset + 1 - count
            holding.ends |= ((1 << count) - 1) << first
            self._places.update(dict.fromkeys(node.hashes[first : offset + 1], node))
            node, blocks = node.parent, blocks - count
            offset = len(node.hashes) - 1

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
