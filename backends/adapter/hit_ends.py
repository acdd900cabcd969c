"""Where a prefix hit can end, in an engine whose groups of layers keep different parts of a prompt in one pool.

A hit may end only where every group still has what the next token needs: full attention all blocks so far, a sliding
window the latest ones, a state the last one. Ends are looked at only at multiples of the engine's alignment: one
*unit* of a prompt's chain.

The engine tells `computed` which units full attention has, and `changed` which blocks any group has gained or lost.
Both only take notes: `settle` decides, once for all changes since the last time. For each unit and each kind of groups
it counts how many blocks in a row, up to the unit's end, all groups of the kind have.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from math import inf
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar

from plait.backends.adapter.cache_journal import CacheJournal, Changes
from plait.backends.adapter.prefix_search import cached_blocks
from plait.backends.protocol.cache_state import HitEnds
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, whole_hash

MOST_NOTES: Final = 8_192
"""With more notes, the next `computed` settles: no report and no waiting call may have asked for long."""

REMEMBERED: Final = 256
"""How many of the latest changes of ends are known to `has_changed`."""

K = TypeVar("K")


class Kind(NamedTuple):
    """Groups of layers that need the same blocks for a hit: the last `needed` before its end; inf: all."""

    groups: tuple[int, ...]
    block_tokens: int
    needed: float = inf


class EngineEnds(Generic[K]):
    """The ends of one engine. `K` names a block's content. `groups_with(key)` tells which groups have it now, as bits
    1 << group.

    A chain has a key for each `key_tokens` tokens; a larger block has the key of its last tokens. `kinds` has full
    attention first. `journal` has the tree blocks at which hits can end.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        groups_with: Callable[[K], int],
        changes: Changes,
        *,
        key_tokens: int,
        align_tokens: int,
        interval_tokens: int = 0,
    ) -> None:
        self.align_tokens, self.interval_tokens = align_tokens, interval_tokens
        self.journal: Final = CacheJournal(changes=changes)
        self._inside: Final = CacheJournal(changes=changes)
        """Ends inside tree blocks, by name, each after the tree block before."""
        self._inner_tokens: dict[int, int] = {}
        self._tells_inside = not 0 < interval_tokens <= TREE_BLOCK_TOKENS  # else there are ends in each tree block
        self.changes = 0
        """How often an end was opened or closed."""
        self._latest: deque[tuple[int, K]] = deque(maxlen=REMEMBERED)
        """The units of the latest changes: index, and last key."""
        self._keys = align_tokens // key_tokens
        step, keys = key_tokens, self._keys
        self._kinds = [
            (sum(1 << group for group in one.groups), one.needed, range(keys - 1, -1, -one.block_tokens // step))
            for one in kinds
        ]
        """Each kind: its groups as bits, the blocks needed, and the places of the blocks in a unit, the last first."""
        self._all_kinds, self._groups_with = range(len(kinds)), groups_with
        self._all_groups = sum(bits for bits, _, _ in self._kinds)
        self._units: dict[K, _Unit[K]] = {}
        """By its last key."""
        self._with_part: dict[K, dict[_Unit[K], None]] = {}
        """The units in which a key is not the last. Empty if a unit has one key."""
        self._named: Counter[int] = Counter()
        """The ends inside each tree block."""
        self._computed: list[tuple[Sequence[K], int, int, int, Sequence[int], Sequence[int]]] = []
        self._changed: list[K] = []
        self.changed = self._changed.append
        """Some group has gained or lost the block with this key."""

    def computed(  # noqa: PLR0917 - the fields of a note
        self,
        chain: Sequence[K],
        first_tokens: int,
        end_tokens: int,
        first_tree_block: int,
        tree_blocks: Sequence[int],
        tokens: Sequence[int],
    ) -> None:
        """Full attention has a chain's blocks between these tokens now.

        `tree_blocks` are the hashes from `first_tree_block` on, the first that ends after the unit with `first_tokens`
        has begun; `tokens` are the chain's, from its begin. What no tokens determine is left out of both.
        """
        if len(self._changed) + len(self._computed) > MOST_NOTES:
            self.settle()  # before this note: the other groups do not have its blocks yet
        first, end = first_tokens // self.align_tokens, end_tokens // self.align_tokens
        if first < end:
            self._computed.append((chain, first, end, first_tree_block, tree_blocks, tokens))

    def deepest(self, chain: Sequence[K], most_tokens: int, guess_tokens: int = 0) -> int:
        """How many tokens of a chain a hit takes now, at most `most_tokens`. The search tries `guess_tokens` first."""
        known = self.leading(chain, most_tokens, guess_tokens) // self.align_tokens
        unit = self._units[chain[known * self._keys - 1]] if known else None
        while unit is not None and not unit.is_end:
            unit = unit.parent
        return 0 if unit is None else (unit.index + 1) * self.align_tokens

    def leading(self, chain: Sequence[K], most_tokens: int, guess_tokens: int = 0) -> int:
        """How many of a chain's leading tokens full attention has now; as `deepest`."""
        self.settle()
        units, keys, align = self._units, self._keys, self.align_tokens
        most = min(most_tokens // align, len(chain) // keys)
        return align * cached_blocks(most, guess_tokens // align, lambda index: chain[(index + 1) * keys - 1] in units)

    def has_changed(self, chain: Sequence[K], since: int, hit_tokens: int) -> bool:
        """Whether an end on a chain, not before `hit_tokens`, may have changed since `changes` was `since`."""
        self.settle()
        new = self.changes - since
        if new > len(self._latest):
            return True
        keys, least = self._keys, hit_tokens // self.align_tokens - 1
        latest = self._latest
        for place in range(len(latest) - new, len(latest)):
            index, key = latest[place]
            end = (index + 1) * keys
            if index >= least and end <= len(chain) and chain[end - 1] == key:
                return True
        return False

    def settle(self) -> None:
        """Decide which ends the noted changes have opened or closed."""
        if not self._changed and not self._computed:
            return
        due: set[_Unit[K]] = set()
        for note in self._computed:
            self._add(*note, due)
        units = self._units
        for key in self._changed:
            unit = units.get(key)
            if unit is not None:
                due.add(unit)
            if self._with_part:
                due.update(self._with_part.get(key, ()))
        self._computed.clear()
        self._changed.clear()
        self._decide(due)

    def clear(self) -> None:
        """The cache was emptied."""
        self._computed.clear()
        self._changed.clear()
        for unit in self._units.values():
            if unit.is_end:
                self._set(unit, is_end=False)
        self._units.clear()
        self._with_part.clear()

    def since(self, cursor: int | None, stored: Container[int]) -> HitEnds:
        """The part of a report, with these tree blocks `stored`. `journal` tells whether it has to be a snapshot."""
        (_, opened, closed), (_, inside, left) = self.journal.since(cursor), self._inside.since(cursor)
        ends = [(run.hashes[-1], len(run.hashes)) for run in opened]
        inner = [(run.parent or 0, self._inner_tokens[name], name) for run in inside for name in run.hashes]
        closed = [*(block for block in closed if block in stored), *left]
        return HitEnds(self.align_tokens, self.interval_tokens, ends, inner, closed)

    def _add(  # noqa: PLR0917 - the fields of a note
        self,
        chain: Sequence[K],
        first: int,
        end: int,
        start: int,
        tree_blocks: Sequence[int],
        tokens: Sequence[int],
        due: set[_Unit[K]],
    ) -> None:
        """Add a chain's units from `first` to `end`, and those before them that are missing, without names."""
        units, keys, align, named = self._units, self._keys, self.align_tokens, first
        while first and chain[first * keys - 1] not in units:
            first -= 1
        parent = units[chain[first * keys - 1]] if first else None
        for index in range(first, end):
            own = tuple(chain[index * keys : (index + 1) * keys])
            unit = units.get(own[-1])
            if unit is None:
                unit = _Unit(parent, index, own, len(self._kinds))
                units[own[-1]] = unit
                for key in own[:-1]:
                    self._with_part.setdefault(key, {})[unit] = None
            if unit.name is None:
                place = (index + 1) * align // TREE_BLOCK_TOKENS - 1 - start
                if 0 <= place < len(tree_blocks):
                    unit.name = tree_blocks[place]
                elif place < 0 and index >= named and parent is not None:
                    unit.name = parent.name
            last = (index + 1) * align
            inner = last % TREE_BLOCK_TOKENS if last <= len(tokens) and not unit.is_end else 0
            if inner and unit.inside is None and unit.name is not None and self._has_all(own[-1]):
                unit.inside = whole_hash(tokens[last - inner : last], unit.name), inner
            due.add(unit)
            parent = unit

    def _decide(self, due: set[_Unit[K]]) -> None:
        """Count anew what groups have up to the ends of these units and, where this changes, of those after them."""
        ordered = sorted(due, key=_INDEX)
        counted: dict[_Unit[K], None] = {}
        for unit in ordered:
            if unit in due:
                self._count(unit, due, counted)
        for unit in counted:
            is_end = 0 not in unit.rows and self._accepts(unit)
            if is_end != unit.is_end:
                self._set(unit, is_end=is_end)
        for unit in reversed(ordered):
            if not unit.rows[0] and unit.child is None and self._units.get(unit.keys[-1]) is unit:
                self._forget(unit)

    def _count(self, first: _Unit[K], due: set[_Unit[K]], counted: dict[_Unit[K], None]) -> None:
        """Count up to the end of a unit, and of those after it that this changes. The units before it are done."""
        left: list[tuple[_Unit[K], Sequence[int]]] = [(first, self._all_kinds)]
        while left:
            unit, numbers = left.pop()
            counted[unit] = None
            if unit in due:
                due.remove(unit)
                numbers, unit.tails = self._all_kinds, self._tails(unit)
            rows, tails, parent, changed = unit.rows, unit.tails, unit.parent, []
            for number in numbers:
                _, needed, places = self._kinds[number]
                row: float = tails[number]
                if row == len(places) and parent is not None:
                    row = min(needed, row + parent.rows[number])
                if row != rows[number]:
                    rows[number] = row
                    changed.append(number)
            child = unit.child if changed else None
            while child is not None:
                left.append((child, changed))
                child = child.next

    def _tails(self, unit: _Unit[K]) -> list[int]:
        """How many of a unit's blocks, the last ones in a row, the groups of each kind have."""
        have, tails = [self._groups_with(key) for key in unit.keys], []
        for bits, _, places in self._kinds:
            tail = 0
            for place in places:
                if have[place] & bits != bits:
                    break
                tail += 1
            tails.append(tail)
        return tails

    def _has_all(self, key: K) -> bool:
        """Whether a hit may end with this key, so that the name of an end inside a tree block is needed."""
        return self._tells_inside and self._groups_with(key) & self._all_groups == self._all_groups

    def _accepts(self, unit: _Unit[K]) -> bool:
        """Whether all groups have what a hit at the end of a unit needs."""
        end = unit.index + 1
        counts = zip(unit.rows, self._kinds, strict=True)
        return all(row >= needed or row >= end * len(places) for row, (_, needed, places) in counts)

    def _set(self, unit: _Unit[K], *, is_end: bool) -> None:
        unit.is_end = is_end
        self.changes += 1
        self._latest.append((unit.index, unit.keys[-1]))
        name = unit.name
        is_inside = self._tells_inside and (unit.index + 1) * self.align_tokens % TREE_BLOCK_TOKENS > 0
        if name is None or (is_inside and unit.inside is None):
            return
        if unit.inside is not None:
            inside, tokens = unit.inside
            if is_end:
                self._inner_tokens[inside] = tokens
                self._inside.store(inside, name)
            else:
                del self._inner_tokens[inside]
                self._inside.remove(inside)
            return
        self._named[name] += 1 if is_end else -1
        if not self._named[name]:
            del self._named[name]
            self.journal.remove(name)
        elif self._named[name] == 1 and is_end:
            before = unit.parent
            while before is not None and before.name == name:
                before = before.parent
            is_next = before is not None and self.align_tokens <= TREE_BLOCK_TOKENS  # else tree blocks lie between
            self.journal.store(name, before.name if before is not None and is_next else None)

    def _forget(self, unit: _Unit[K]) -> None:
        """Forget a unit without a last full-attention block, and those before it, unless others follow."""
        last: _Unit[K] | None = unit
        while last is not None and last.child is None and not last.rows[0]:
            del self._units[last.keys[-1]]
            for key in last.keys[:-1]:
                of_key = self._with_part[key]
                del of_key[last]
                if not of_key:
                    del self._with_part[key]
            last.leave()
            last = last.parent


class _Unit(Generic[K]):
    """The tokens of a chain from one multiple of the alignment to the next.

    `name` is the last tree block that ends in the chain so far; None: not known. `inside` is the name of an end inside
    the next tree block, and how many tokens into it. For each kind, `rows` has the blocks
    in a row up to the end, at most as many as it needs, and `tails` those within the unit. The units that follow are
    linked from `child` by `next`: lists would be one more object each for the garbage collector.
    """

    __slots__ = ("child", "index", "inside", "is_end", "keys", "name", "next", "parent", "previous", "rows", "tails")

    def __init__(self, parent: _Unit[K] | None, index: int, keys: tuple[K, ...], kinds: int) -> None:
        self.parent, self.index, self.keys = parent, index, keys
        self.rows: list[float] = [0] * kinds
        self.tails: list[int] = []
        self.name: int | None = None
        self.inside: tuple[int, int] | None = None
        self.is_end = False
        self.child: _Unit[K] | None = None
        self.previous: _Unit[K] | None = None
        self.next: _Unit[K] | None = None if parent is None else parent.child
        if parent is not None:
            parent.child = self
        if self.next is not None:
            self.next.previous = self

    def leave(self) -> None:
        """Take the unit from those that follow its parent."""
        if self.next is not None:
            self.next.previous = self.previous
        if self.previous is not None:
            self.previous.next = self.next
        elif self.parent is not None:
            self.parent.child = self.next


_INDEX: Final = attrgetter("index")
