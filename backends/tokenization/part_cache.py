"""The ids and block hashes of prompts' beginnings, part by part, so that a shared beginning is tokenized once."""

from __future__ import annotations

import itertools
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

_ENTRY_BYTES: Final = 570
"""Of a part besides its text, ids and hashes: its objects and its place in the table (measured)."""


_CHARACTERS_PER_BYTE: Final = 1 / 16
"""A prompt of that share takes a sixth of the cache, at 2.5 bytes a character. A longer one is not worth all others."""

Key = tuple[Hashable, str]
"""A part in its place: the number of the part before it, or the scope of a prompt's first part; and its text."""


class Part(NamedTuple):
    """`ids` are those of the part's text, `hashes` those of the tree blocks that end in it."""

    key: Key
    number: int
    ids: array[int]
    hashes: array[int]
    size_bytes: int


class PartCache:
    """Parts in `max_bytes` of memory, the least recently used evicted first; safe to call from several threads.

    Keys hold the texts themselves, so no two texts can be taken for each other. A part's number is never given again,
    so nothing is found behind a part that was evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: OrderedDict[Key, Part] = OrderedDict()
        self._followers: dict[Hashable, Part] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"PartCache({len(self._parts)} parts, {self.held_bytes} of {self._max_bytes} bytes)"

    def takes(self, text: str) -> bool:
        """Whether a prompt is short enough to be kept."""
        return len(text) <= self._max_bytes * _CHARACTERS_PER_BYTE

    def get(self, key: Key) -> Part | None:
        """The part, if it is there."""
        return self._parts.get(key)

    def follower(self, before: Hashable) -> Part | None:
        """The part that was used last behind another, or first in a scope. `before` is the first of its key."""
        return self._followers.get(before)

    def put(self, key: Key, ids: array[int], hashes: array[int]) -> Part:
        """Keep a part; the one that is there already stays."""
        size = sys.getsizeof(key[1]) + 4 * len(ids) + 8 * len(hashes) + _ENTRY_BYTES
        with self._lock:
            part = self._parts.get(key)
            if part is None:
                part = Part(key, next(self._numbers), ids, hashes, size)
                self._keep(part)
        return part

    def used(self, path: Sequence[Part]) -> None:
        """Mark a prompt's parts as used, given from its first on. A part is evicted before the part that it follows."""
        with self._lock:
            for part in reversed(path):
                if part.key in self._parts:
                    self._parts.move_to_end(part.key)
                    self._followers[part.key[0]] = part

    def _keep(self, part: Part) -> None:
        self._parts[part.key] = part
        self.held_bytes += part.size_bytes
        while self.held_bytes > self._max_bytes:
            key, evicted = self._parts.popitem(last=False)
            self.held_bytes -= evicted.size_bytes
            if self._followers.get(key[0]) is evicted:
                del self._followers[key[0]]
