"""How a new file takes the place of a malformed one, whenever the process ends meanwhile."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from plait.gateway.store.file_place import make_file

SUFFIXES: Final = ("", "-wal", "-shm")
"""The endings of the names of SQLite's files: the database, its write-ahead log and that log's index."""


class SavedFile:
    """The new file beside the malformed one at `place`. Who closes it when it is whole calls `replace`."""

    def __init__(self, place: Path) -> None:
        self.path = Path(f"{place}.saved")
        self._place = place

    @property
    def is_left(self) -> bool:
        """Whether a process has ended when the malformed file had gone, and this one was not there yet."""
        return self.path.exists() and not self._place.exists()

    def begin(self) -> None:
        for suffix in SUFFIXES:
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        make_file(self.path)

    def replace(self, aside: Path) -> None:
        """Move the malformed file aside, then its WAL, which must never meet the new file, then that to its place."""
        for suffix in SUFFIXES:
            with suppress(FileNotFoundError):
                Path(f"{self._place}{suffix}").rename(f"{aside}{suffix}")
        self.path.rename(self._place)
