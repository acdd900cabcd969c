"""The replacement of a malformed SQLite file by a new one, which survives a crash at any point."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from plait.gateway.store.file_place import make_file

SUFFIXES: Final = ("", "-wal", "-shm")
"""The endings of the names of SQLite's files: the database, its write-ahead log and that log's index."""


class SavedFile:
    """The new file beside the malformed one at `place`. Close it when it is whole, then call `replace`."""

    def __init__(self, place: Path) -> None:
        self.path = Path(f"{place}.saved")
        self._place = place

    @property
    def is_left(self) -> bool:
        """Whether a process ended between the two renames of `replace`: only the new file is there."""
        return self.path.exists() and not self._place.exists()

    def begin(self) -> None:
        for suffix in SUFFIXES:
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        make_file(self.path)

    def replace(self, aside: Path) -> None:
        """Rename the malformed file and its WAL, then the new file, in this order: an old WAL would corrupt it."""
        for suffix in SUFFIXES:
            with suppress(FileNotFoundError):
                Path(f"{self._place}{suffix}").rename(f"{aside}{suffix}")
        self.path.rename(self._place)
