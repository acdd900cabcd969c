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
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

from plait.backends.adapter.cache_journal import CacheJournal, Changes
from plait.backends.adapter.prefix_search import cached_blocks
from plait.backends.protocol.cache_state import HitEnds
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

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
    """The ends of one engine. `has(key, group)` tells whether a group has a block now; `K` names a block's content.

    A chain has a key for each `key_tokens` tokens; a larger block has the key of its last tokens. `kinds` has full
    attention first. `journal` has the tree blocks at which hits can end.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        has: Callable[[K, int], bool],
        changes: Changes,
        *,
        key_tokens: int,
        align_tokens: int,
        interval_tokens: int = 0,
    ) -> None:
        self.align_tokens, self.interval_tokens = align_tokens, interval_tokens
        self.journal: Final = CacheJournal(changes=changes)
        self.changes = 0
        """How often an end was opened or closed."""
        self._latest: deque[tuple[int, K]] = deque(maxlen=REMEMBERED)
        """The units of the latest changes: index, and last key."""
        self._kinds, self._has = kinds, has
        self._keys = align_tokens // key_tokens
        self._key_places = [
            [*range(kind.block_tokens // key_tokens - 1, self._keys, kind.block_tokens // key_tokens)] for kind in kinds
        ]
        self._units: dict[K, _Unit[K]] = {}
        """By its last key."""
        self._with_part: dict[K, dict[_Unit[K], None]] = {}
        """The units in which a key is not the last. Empty if a unit has one key."""
        self._named: Counter[int] = Counter()
        """The ends inside each tree block."""
        self._computed: list[tuple[Sequence[K], int, int, int, Sequence[int]]] = []
        self._changed: list[K] = []
        self.changed = self._changed.append
        """Some group has gained or lost the block with this key."""

    def computed(
        self, chain: Sequence[K], first_tokens: int, end_tokens: int, first_tree_block: int, tree_blocks: Sequence[int]
    ) -> None:
        """Full attention has a chain's blocks between these tokens now.

        `tree_blocks` are the hashes from `first_tree_block` on, the first that ends after the unit with `first_tokens`
        has begun. Those that no tokens determine are left out.
        """
        first, end = first_tokens // self.align_tokens, end_tokens // self.align_tokens
        if first < end:
            self._computed.append((chain, first, end, first_tree_block, tree_blocks))
        if len(self._changed) > MOST_NOTES:
            self.settle()

    def deepest(self, chain: Sequence[K], most_tokens: int, guess_tokens: int = 0) -> int:
        """How many tokens of a chain a hit takes now, at most `most_tokens`. The search tries `guess_tokens` first."""
        self.settle()
        units, keys, align = self._units, self._keys, self.align_tokens
        most = min(most_tokens // align, len(chain) // keys)
        known = cached_blocks(most, guess_tokens // align, lambda index: chain[(index + 1) * keys - 1] in units)
        unit = units[chain[known * keys - 1]] if known else None
        while unit is not None and not unit.is_end:
            unit = unit.parent
        return 0 if unit is None else (unit.index + 1) * align

    def has_changed(self, chain: Sequence[K], since: int, hit_tokens: int) -> bool:
        """Whether an end on a chain, not before `hit_tokens`, may have changed since `changes` was `since`."""
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
        due: dict[_Unit[K], None] = {}
        for chain, first, end, first_tree_block, tree_blocks in self._computed:
            self._add(chain, first, end, first_tree_block, tree_blocks, due)
        units = self._units
        for key in self._changed:
            unit = units.get(key)
            if unit is not None:
                due[unit] = None
            if self._with_part:
                due.update(self._with_part.get(key, {}))
        self._computed.clear()
        self._changed.clear()
        self._count(due)

    def clear(self) -> None:
        """The cache was emptied."""
        self._computed.clear()
        self._changed.clear()
        for unit in self._units.values():
            if unit.is_end:
                self._set(unit, is_end=False)
        self._units.clear()
        self._with_part.clear()

    def since(self, cursor: int | None) -> HitEnds:
        """The part of a report. `journal` tells whether it has to be a snapshot."""
        _, opened, closed = self.journal.since(cursor)
        runs = [(run.hashes[-1], len(run.hashes)) for run in opened]
        return HitEnds(self.align_tokens, self.interval_tokens, runs, [], closed)

    def _add(  # noqa: PLR0917 - the fields of a note
        self,
        chain: Sequence[K],
        first: int,
        end: int,
        start: int,
        tree_blocks: Sequence[int],
        due: dict[_Unit[K], None],
    ) -> None:
        """Add a chain's units from `first` to `end`, and those before them that are missing, without names."""
        units, keys, align = self._units, self._keys, self.align_tokens
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
                if parent is not None:
                    parent.children.append(unit)
            if unit.name is None:
                place = (index + 1) * align // TREE_BLOCK_TOKENS - 1 - start
                if 0 <= place < len(tree_blocks):
                    unit.name = tree_blocks[place]
                elif place < 0 and parent is not None:
                    unit.name = parent.name
            due[unit] = None
            parent = unit

    def _count(self, due: dict[_Unit[K], None]) -> None:
        """Count anew what the kinds have up to the ends of these units and, where this changes, of those after them."""
        queue = [(unit.index, number, unit) for number, unit in enumerate(due)]
        heapify(queue)
        number = len(queue)
        while queue:
            _, _, unit = heappop(queue)
            counts, is_end = self._counts(unit)
            if counts != unit.counts:
                unit.counts = counts
                for child in unit.children:
                    if child not in due:
                        due[child] = None
                        number += 1
                        heappush(queue, (child.index, number, child))
            if is_end != unit.is_end:
                self._set(unit, is_end=is_end)
            del due[unit]
            if not counts[0]:
                self._forget(unit, due)

    def _counts(self, unit: _Unit[K]) -> tuple[list[float], bool]:
        has, parent, is_end, counts = self._has, unit.parent, True, []
        for number, ((groups, _, needed), places) in enumerate(zip(self._kinds, self._key_places, strict=True)):
            row = 0.0
            for place in reversed(places):
                key = unit.keys[place]
                if not all(has(key, group) for group in groups):
                    break
                row += 1
            else:
                row = min(needed, row + (parent.counts[number] if parent is not None else 0))
            counts.append(row)
            is_end = is_end and row >= min(needed, (unit.index + 1) * len(places))
        return counts, is_end

    def _set(self, unit: _Unit[K], *, is_end: bool) -> None:
        unit.is_end = is_end
        self.changes += 1
        self._latest.append((unit.index, unit.keys[-1]))
        name = unit.name
        if name is None:
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

    def _forget(self, unit: _Unit[K], due: dict[_Unit[K], None]) -> None:
        """Forget a unit without a last full-attention block, and those before it, unless others follow."""
        while not unit.children and not unit.counts[0] and unit not in due:
            del self._units[unit.keys[-1]]
            for key in unit.keys[:-1]:
                of_key = self._with_part[key]
                del of_key[unit]
                if not of_key:
                    del self._with_part[key]
            parent = unit.parent
            if parent is None:
                return
            parent.children.remove(unit)
            unit = parent


class _Unit(Generic[K]):
    """The tokens of a chain from one multiple of the alignment to the next.

    `name` is the last tree block that ends in the chain so far; None: not known. `counts` has the blocks in a row of
    each kind, at most as many as it needs.
    """

    __slots__ = ("children", "counts", "index", "is_end", "keys", "name", "parent")

    def __init__(self, parent: _Unit[K] | None, index: int, keys: tuple[K, ...], kinds: int) -> None:
        self.parent = parent
        self.index = index
        self.keys = keys
        self.counts: list[float] = [0.0] * kinds
        self.name: int | None = None
        self.is_end = False
        self.children: list[_Unit[K]] = []
