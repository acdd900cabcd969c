"""Stderr of a server, which a thread of its own writes.

Whoever reads it may stop to read, or may have gone: no call waits for that, and no end of the process waits for long.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from queue import SimpleQueue
from select import PIPE_BUF
from threading import RLock, Thread
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_LINES = 10_000

MAX_BYTES = 4 * 2**20
"""Some 10,000 lines of calls: what a busy gateway logs in half a minute."""

FULL = "full"
"""Why a line was dropped that found no room."""

Line = tuple[int, bool, bytes]
"""A line with its number, and whether it is urgent. A line may have several lines of text, such as a traceback."""

PAUSE_S = 0.02
"""Between two rounds of writing, once they follow each other so closely. A first line is written at once; under load,
lines go out together: a thread that wakes up for each line takes more CPU time than the line.
"""

LAST_S = 1.0
"""What the end of the process waits for the last lines to be written."""


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


class LineWriter:
    """Writes lines to a file descriptor, from a thread of its own. What cannot be written is dropped and counted."""

    def __init__(self, fd: int, lines: LineBuffer) -> None:
        self.lines = lines
        self._fd = fd
        self._wakes: SimpleQueue[None] = SimpleQueue()  # may be put to in a finalizer
        self._is_idle = False
        self._is_writing = False
        self._is_torn = False
        self._waits_until_s: float | None = None
        self._thread = Thread(target=self._run, name="log", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, line: bytes, *, urgent: bool) -> None:
        """Write this soon. Lines that are not `urgent` are dropped first."""
        self.lines.put(line, urgent=urgent)
        if self._is_idle:
            self._is_idle = False
            self._wakes.put(None)

    def wait_until_written(self) -> bool:
        """Wait until no line is left, which is True, but for `LAST_S` at most. If called again, not for longer."""
        now_s = time.monotonic()
        until_s = self._waits_until_s = self._waits_until_s or now_s + LAST_S
        while (self.lines or self._is_writing) and self._thread.is_alive():
            if now_s >= until_s:
                return False
            time.sleep(0.002)
            now_s = time.monotonic()
        self._waits_until_s = None
        return not self.lines

    def _run(self) -> None:
        last_s = 0.0
        while True:
            self._is_idle = True
            if not self.lines:
                self._wakes.get()
            self._is_idle = False
            written = self._write_all()
            now_s = time.monotonic()
            if written > 1 or now_s - last_s < PAUSE_S:
                time.sleep(PAUSE_S)
            last_s = now_s

    def _write_all(self) -> int:
        """Write until no line is left; returns how many there were."""
        written = 0
        self._is_writing = True
        while taken := self.lines.take(PIPE_BUF):  # others who write to the same pipe do not come in between
            written += len(taken)
            try:
                self._write(b"".join(line for _, _, line in taken))
            except OSError as error:
                self.lines.count_dropped(taken, errno.errorcode.get(error.errno or 0, "unknown"))
        self._is_writing = False
        return written

    def _write(self, data: bytes) -> None:
        rest = memoryview(b"\n" + data if self._is_torn else data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # whoever shares the descriptor may have made it so
                time.sleep(PAUSE_S)
            else:
                self._is_torn = bool(rest)


class _Unbuffered(io.RawIOBase):
    """What is below `BackgroundStderr`."""

    def __init__(self, writer: LineWriter, fd: int) -> None:
        self._writer = writer
        self._fd = fd

    def fileno(self) -> int:
        """Of the stream that is written to."""
        return self._fd

    def isatty(self) -> bool:
        """Of the stream that is written to."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: ReadableBuffer) -> int:
        """What is not of the log, such as a traceback of the interpreter, counts as urgent."""
        written = bytes(data)
        self._writer.put(written, urgent=True)
        return len(written)


class BackgroundStderr(io.TextIOWrapper):
    """Stands for `sys.stderr`. Nothing that is written to it waits."""

    def __init__(self, writer: LineWriter, fd: int, encoding: str) -> None:
        raw = cast("BinaryIO", _Unbuffered(writer, fd))
        super().__init__(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)
        self.writer = writer


def write_stderr_in_background() -> None:
    """From now on a thread writes what goes to `sys.stderr`. The end of the process waits for it, but not for long."""
    if sys.stderr is None:  # the process was started without one
        fd, encoding = os.open(os.devnull, os.O_WRONLY), "utf-8"
    else:
        fd, encoding = sys.stderr.fileno(), sys.stderr.encoding
    writer = LineWriter(fd, LineBuffer())
    writer.start()
    sys.stderr = BackgroundStderr(writer, fd, encoding)
    atexit.register(_close)


def wait_until_written() -> bool:
    """Whether all that went to stderr is written. This waits for it, but for `LAST_S` at most."""
    return not isinstance(sys.stderr, BackgroundStderr) or sys.stderr.writer.wait_until_written()


def dropped_lines() -> Mapping[tuple[bool, str], int]:
    """The lines that were dropped, by whether they were urgent, and by the reason."""
    return sys.stderr.writer.lines.dropped if isinstance(sys.stderr, BackgroundStderr) else Counter()


def _close() -> None:
    """What the interpreter says at its very end goes to stderr itself, if that was read so far."""
    if wait_until_written() and sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__
