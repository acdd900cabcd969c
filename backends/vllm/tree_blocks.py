"""Translates engine blocks, which vLLM names by chained keys, into blocks of the gateway's prefix tree.

A run is the consecutive engine blocks that overlap one tree block. Usually a tree block has one run. vLLM may have
several copies of an engine block; `inserted` and `removed` count copies. Tree blocks that branch in the middle share
their first engine blocks. `composed` adds a run. Keys are chained, so the key of the last engine block tells the run's
tokens; a large engine block is the last of several runs. A run is forgotten when its last engine block has no copy
left. The tier has a tree block exactly while each engine block of one of the tree block's runs has a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from plait.backends.adapter.tree_block_tiers import TreeBlockTiers


class TreeBlocks:
    """Tells `tiers` which tree blocks the tier with this number has."""

    def __init__(self, tiers: TreeBlockTiers, tier: int = 0) -> None:
        self.copies: dict[bytes, int] = {}
        """Copies of each engine block in the cache, by key."""
        self._tiers, self._tier = tiers, tier
        self._runs: dict[bytes, tuple[_Run, ...]] = {}
        """By the key of the last block of these runs, in the order of their tree blocks."""
        self._run_of_part: dict[bytes, _Run] = {}
        """A run in which the key is not the last. Most keys are in one run."""
        self._more_of_part: dict[bytes, dict[_Run, None]] = {}
        """By key: the runs in which it is not the last, but for the one in `_run_of_part`."""

    def inserted(self, key: bytes) -> None:
        """The cache has one more copy of an engine block."""
        if key in self.copies:
            self.copies[key] += 1
            return
        self.copies[key] = 1
        if key in self._run_of_part:
            for run in self._runs_with(key):
                run.missing -= 1
                if run.missing == 0:
                    self._store(run)

    def removed(self, key: bytes) -> None:
        """The cache has lost one copy of an engine block."""
        copies = self.copies[key] - 1
        if copies:
            self.copies[key] = copies
            return
        del self.copies[key]
        for run in self._runs.pop(key, ()):
            self._forget(run)
        if key in self._run_of_part:
            for run in self._runs_with(key):
                if run.missing == 0:
                    self._remove(run)
                run.missing += 1

    def composed(self, tree_block: int, parent: int | None, keys: Sequence[bytes]) -> None:
        """`tree_block`, which follows `parent`, has these engine blocks. No effect if the last one is not cached."""
        *parts, last = keys
        copies, run_of_part = self.copies, self._run_of_part
        runs = self._runs.get(last, ())
        if last not in copies or any(run.tree_block == tree_block for run in runs):
            return
        run = _Run(tree_block, parent, parts)
        self._runs[last] = (run, *runs) if parts else (*runs, run)  # of several, only the first can have other parts
        for key in parts:
            if key not in copies:
                run.missing += 1
            if run_of_part.setdefault(key, run) is not run:
                self._more_of_part.setdefault(key, {})[run] = None
        if run.missing == 0:
            self._store(run)

    def tree_block(self, last_key: bytes) -> int | None:
        """The last tree block that ends with this engine block; None if there is none."""
        runs = self._runs.get(last_key)
        return runs[-1].tree_block if runs else None

    def compositions(self, last_key: bytes) -> list[tuple[int, int | None, list[bytes]]]:
        """The arguments of `composed` for each tree block that ends with this engine block."""
        return [(run.tree_block, run.parent, [*run.parts, last_key]) for run in self._runs.get(last_key, ())]

    def clear(self) -> None:
        for run in chain.from_iterable(self._runs.values()):
            if run.missing == 0:
                self._remove(run)
        for known in (self.copies, self._runs, self._run_of_part, self._more_of_part):
            known.clear()

    def _runs_with(self, key: bytes) -> tuple[_Run, ...]:
        return (self._run_of_part[key], *self._more_of_part.get(key, ()))

    def _forget(self, run: _Run) -> None:
        if run.missing == 0:
            self._remove(run)
        for key in run.parts:
            others = self._more_of_part.get(key)
            if others is None:
                del self._run_of_part[key]
                continue
            if self._run_of_part[key] is run:
                self._run_of_part[key] = next(iter(others))
            others.pop(run, None)
            others.pop(self._run_of_part[key], None)
            if not others:
                del self._more_of_part[key]

    def _store(self, run: _Run) -> None:
        self._tiers.add(run.tree_block, run.parent, self._tier)

    def _remove(self, run: _Run) -> None:
        self._tiers.remove(run.tree_block, run.parent, self._tier)


class _Run:
    """The engine blocks of one tree block. `parts` are all but the last. `missing` counts the parts without a copy."""

    __slots__ = ("missing", "parent", "parts", "tree_block")

    def __init__(self, tree_block: int, parent: int | None, parts: Sequence[bytes]) -> None:
        self.tree_block = tree_block
        self.parent = parent
        self.parts = parts
        self.missing = 0
