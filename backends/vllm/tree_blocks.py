"""Translates engine blocks, which vLLM names by chained keys, into blocks of the gateway's prefix tree.

A run is the consecutive engine blocks that make up one tree block. Usually a tree block has one run. vLLM may have
several copies of an engine block; `inserted` and `removed` count copies. Tree blocks that branch in the middle share
their first engine blocks. `composed` adds a run. Keys are chained, so the key of the last engine block identifies a
run. A run is forgotten when its last engine block has no copy left. The journal has a tree block exactly while each
engine block of one of the tree block's runs has a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Journal(Protocol):
    """The part of `CacheJournal` that `TreeBlocks` uses."""

    def store(self, block: int, parent: int | None) -> None:
        """All of `block`, which follows `parent`, is cached now."""

    def remove(self, block: int) -> None:
        """A part of `block` was evicted."""


class TreeBlocks:
    def __init__(self, journal: Journal) -> None:
        self.copies: dict[bytes, int] = {}
        """Copies of each engine block in the cache, by key."""
        self._journal = journal
        self._runs: dict[bytes, _Run] = {}
        """By the key of a run's last block."""
        self._run_of_part: dict[bytes, _Run] = {}
        """A run in which the key is not the last. Most keys are in one run."""
        self._more_of_part: dict[bytes, dict[_Run, None]] = {}
        """By key: the runs in which it is not the last, but for the one in `_run_of_part`."""
        self._whole: dict[int, int] = {}
        """How many runs of a tree block have all their engine blocks in the cache."""

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
        own = self._runs.pop(key, None)
        if own is not None:
            self._forget(own)
        if key in self._run_of_part:
            for run in self._runs_with(key):
                if run.missing == 0:
                    self._remove(run)
                run.missing += 1

    def composed(self, tree_block: int, parent: int | None, keys: Sequence[bytes]) -> None:
        """`tree_block`, which follows `parent`, has these engine blocks. No effect if the last one is not cached."""
        *parts, last = keys
        copies, run_of_part = self.copies, self._run_of_part
        if last in self._runs or last not in copies:
            return
        run = self._runs[last] = _Run(tree_block, parent, parts)
        for key in parts:
            if key not in copies:
                run.missing += 1
            if run_of_part.setdefault(key, run) is not run:
                self._more_of_part.setdefault(key, {})[run] = None
        if run.missing == 0:
            self._store(run)

    def tree_block(self, last_key: bytes) -> int | None:
        """The tree block that ends with this engine block; None if there is none."""
        run = self._runs.get(last_key)
        return run.tree_block if run is not None else None

    def composition(self, last_key: bytes) -> tuple[int, int | None, list[bytes]] | None:
        """The arguments of `composed` for the tree block that ends with this engine block; None if there is none."""
        run = self._runs.get(last_key)
        return (run.tree_block, run.parent, [*run.parts, last_key]) if run is not None else None

    def clear(self) -> None:
        for tree_block in self._whole:
            self._journal.remove(tree_block)
        for known in (self.copies, self._runs, self._run_of_part, self._more_of_part, self._whole):
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
        # Engine keys may differ where tree blocks do not, which then have several runs. The journal gets the first one.
        whole = self._whole.get(run.tree_block, 0)
        self._whole[run.tree_block] = whole + 1
        if whole == 0:
            self._journal.store(run.tree_block, run.parent)

    def _remove(self, run: _Run) -> None:
        whole = self._whole[run.tree_block] - 1
        if whole:
            self._whole[run.tree_block] = whole
        else:
            del self._whole[run.tree_block]
            self._journal.remove(run.tree_block)


class _Run:
    """The engine blocks of one tree block. `parts` are all but the last. `missing` counts the parts without a copy."""

    __slots__ = ("missing", "parent", "parts", "tree_block")

    def __init__(self, tree_block: int, parent: int | None, parts: Sequence[bytes]) -> None:
        self.tree_block = tree_block
        self.parent = parent
        self.parts = parts
        self.missing = 0
