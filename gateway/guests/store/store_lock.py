"""The lock file beside a store's file: it names the process that has the store, and the store's last epoch.

The kernel releases the lock when the process ends. The file stays, so that a store that has vanished, or was replaced
by an older copy, is noticed.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from plait.gateway.guests.store.event_log import HeldElsewhereError


class StoreLock:
    """The lock of the store at `path`, in `PATH.lock`: a line with the process, and one with the epoch."""

    def __init__(self, path: Path) -> None:
        self.file = Path(f"{path}.lock")
        self._path = path
        self._descriptor: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the store's latest holder; 0 if there was none."""
        return self._noted()[1]

    def take(self) -> None:
        """Take the lock, unless it is taken already. Raises `HeldElsewhereError` or OSError."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self.file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            holder = self._noted()[0] or "unknown"
            raise HeldElsewhereError(f"{self._path} is held by another gateway (process {holder})") from None
        self._descriptor = descriptor
        self.note(self.epoch)

    def note(self, epoch: int) -> None:
        """Write the store's epoch. One write of a fixed length, so that no crash leaves half of it."""
        assert self._descriptor is not None, "it is taken first"
        os.pwrite(self._descriptor, b"%-20d\n%-20d\n" % (os.getpid(), epoch), 0)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _noted(self) -> tuple[int, int]:
        """The process and the epoch; 0 for what is missing."""
        try:
            lines = self.file.read_text(encoding="ascii", errors="replace").split()
        except FileNotFoundError:
            return 0, 0
        process, epoch, *_ = [int(line) if line.isdecimal() else 0 for line in (*lines, "", "")]
        return process, epoch
