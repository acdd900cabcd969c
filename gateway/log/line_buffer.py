"""Lines that wait to be written, within bounds."""

from __future__ import annotations

from collections import Counter, deque
from threading import RLock

MAX_LINES = 10_000
MAX_BYTES = 4 * 2**20
"""Some 10,000 lines of calls: what a busy gateway logs in half a minute."""

FULL = "full"
"""Why a line was dropped that found no room."""

Line = tuple[int, bool, bytes]
"""A line with its number, and whether it is urgent. A line may have several lines of text, such as a traceback."""


class LineBuffer:
    """A queue of lines, for several threads. Nothing in it waits for long.

    When it is full, a new line is dropped. An urgent one finds room as long as others are there to make way: the newest
    of these go first, so that what stays has no gaps. Dropped lines are counted by urgency and by the reason.
    """

    def __init__(self, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        self.dropped: Counter[tuple[bool, str]] = Counter()
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._common: deque[Line] = deque()
        self._urgent: deque[Line] = deque()
        self._number = 0
        self._size_bytes = 0
        # A finalizer that logs may run wherever memory is allocated, also in here.
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._common) + len(self._urgent)

    def put(self, line: bytes, *, urgent: bool) -> None:
        """Add a line, or drop it."""
        with self._lock:
            if not self._has_room(line) and not (urgent and self._make_way(line)):
                self.dropped[urgent, FULL] += 1
                return
            self._number += 1
            self._size_bytes += len(line)
            (self._urgent if urgent else self._common).append((self._number, urgent, line))

    def take(self, most_bytes: int) -> list[Line]:
        """The oldest lines, together at most `most_bytes` long, but at least one. Nothing if none is there."""
        taken: list[Line] = []
        with self._lock:
            size_bytes = 0
            while self:
                oldest = self._oldest()
                size_bytes += len(oldest[0][2])
                if taken and size_bytes > most_bytes:
                    break
                taken.append(oldest.popleft())
            self._size_bytes -= sum(len(line) for _, _, line in taken)
        return taken

    def count_dropped(self, lines: list[Line], reason: str) -> None:
        """Count lines that were taken, but could not be written."""
        with self._lock:
            for _, urgent, _ in lines:
                self.dropped[urgent, reason] += 1

    def _make_way(self, line: bytes) -> bool:
        """Drop lines that are not urgent until there is room; returns whether there is."""
        while self._common and not self._has_room(line):
            self._size_bytes -= len(self._common.pop()[2])
            self.dropped[False, FULL] += 1
        return self._has_room(line)

    def _has_room(self, line: bytes) -> bool:
        lines = len(self._common) + len(self._urgent)
        return lines < self._max_lines and self._size_bytes + len(line) <= self._max_bytes

    def _oldest(self) -> deque[Line]:
        """The queue that begins with the oldest line."""
        if self._common and self._urgent:
            return min(self._common, self._urgent, key=lambda queue: queue[0][0])
        return self._common or self._urgent
