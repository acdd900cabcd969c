"""A bounded store of the newest receipts, as bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

OVERHEAD_BYTES: Final = 240
"""The memory of an entry beyond its bytes: the object, its key, and its places in the containers."""


class Ring:
    """The newest entries by key, in at most `max_bytes` of memory. `get` returns the newest entry of a key."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: deque[tuple[int, bytes]] = deque()  # the oldest first
        self._newest: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: int, entry: bytes) -> None:
        """Add an entry, and drop the oldest ones beyond `max_bytes`."""
        entry = bytes(memoryview(entry))  # a copy of the exact size: an encoder's result has half as much spare memory
        self._newest[key] = entry
        self._entries.append((key, entry))
        self._bytes += len(entry) + OVERHEAD_BYTES
        while self._bytes > self._max_bytes:
            old, gone = self._entries.popleft()
            self._bytes -= len(gone) + OVERHEAD_BYTES
            if self._newest[old] is gone:
                del self._newest[old]

    def get(self, key: int) -> bytes | None:
        return self._newest.get(key)

    def newest(self) -> Iterator[bytes]:
        """A snapshot of the entries, the newest first."""
        yield from [entry for _, entry in reversed(self._entries)]
