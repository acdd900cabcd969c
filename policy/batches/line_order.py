"""The order of a batch's lines: those that begin with the same text run one after the other, so that it is cached.

A text is a chain of the hashes of its kilobytes, as engines name the blocks of a prompt: no tokenizer is needed. Sorted
by their chains, lines are in the order of a depth-first walk of the tree of their beginnings. The sorted lines are cut
into a part for each engine, at the roots of subtrees: otherwise all engines would compute the same beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby, takewhile
from typing import Final

STEP_BYTES: Final = 1024
MOST_STEPS: Final = 32
"""What follows a beginning of so many steps changes no order."""

Chain = bytes
"""The hashes of a text's steps, each of `HASH_BYTES` and of all before it."""

HASH_BYTES: Final = 6


def chain_of(text: bytes) -> Chain:
    """The chain of a text. One that is shorter than a step has an empty one."""
    before, found = b"", []
    for begin in range(0, min(len(text), MOST_STEPS * STEP_BYTES) - STEP_BYTES + 1, STEP_BYTES):
        before = blake2b(before + text[begin : begin + STEP_BYTES], digest_size=HASH_BYTES).digest()
        found.append(before)
    return b"".join(found)


class LinesLeft:
    """The lines of a batch that are still to be sent: a part for each engine, each in the order of its beginnings.

    An engine whose part is over takes over half of the longest one.
    """

    def __init__(self, chains: Sequence[Chain], lines: Iterable[int], engines: Sequence[str]) -> None:
        self._chains = chains
        ordered = sorted(lines, key=chains.__getitem__)
        parts = _divided(chains, ordered, max(1, len(engines)))
        self._parts = [deque(part) for part in parts]
        self._part_of = dict(zip(engines, self._parts, strict=False))
        self._latest: dict[str, Chain] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def next(self, engine: str) -> int | None:
        """The line that the engine gets next; None: none is left."""
        own = self._part_of.get(engine)
        if not own:
            longest = max(self._parts, key=len)
            if not longest:
                return None
            if own is None:
                own = self._part_of[engine] = deque()
                self._parts.append(own)
            for _ in range(-(-len(longest) // 2)):
                own.appendleft(longest.pop())
        return own[0]

    def shared_bytes(self, engine: str, line: int) -> int:
        """How much of the line's beginning the line has that the engine got last."""
        own, latest = self._chains[line], self._latest.get(engine, b"")
        equal = (own[at : at + HASH_BYTES] == latest[at : at + HASH_BYTES] for at in range(0, len(own), HASH_BYTES))
        return STEP_BYTES * sum(takewhile(bool, equal))

    def take(self, engine: str) -> int:
        """Take the next line of the engine, of which there is one."""
        line = self._part_of[engine].popleft()
        self._latest[engine] = self._chains[line]
        return line

    def give_back(self, line: int) -> None:
        """A line has to be sent again: it is the next one of the longest part."""
        max(self._parts, key=len).appendleft(line)

    def clear(self) -> None:
        for part in self._parts:
            part.clear()


def _divided(chains: Sequence[Chain], ordered: Sequence[int], parts: int) -> list[list[int]]:
    """The ordered lines in parts of about equal length, cut between subtrees where one is no longer than a part."""
    most = -(-len(ordered) // max(1, parts))
    found: list[list[int]] = [[]]
    for subtree in _subtrees(chains, ordered, most):
        if found[-1] and len(found[-1]) + len(subtree) / 2 > most and len(found) < parts:
            found.append([])
        found[-1] += subtree
    return found


def _subtrees(chains: Sequence[Chain], ordered: Sequence[int], most: int, depth: int = 0) -> Iterator[Sequence[int]]:
    """Runs of lines with a common beginning. One that is longer than a part is divided where its lines differ."""
    end = (depth + 1) * HASH_BYTES
    for beginning, run in groupby(ordered, lambda line: chains[line][:end]):
        lines = list(run)
        if len(lines) <= most:
            yield lines
        elif len(beginning) < end or depth == MOST_STEPS:
            yield from (lines[begin : begin + most] for begin in range(0, len(lines), max(1, most)))
        else:
            yield from _subtrees(chains, lines, most, depth + 1)
