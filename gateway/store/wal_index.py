"""How many pages SQLite's index of a write-ahead log has counted. The index outlives a process that is killed.

The index (`PATH-shm`) is shared memory in a file, in the byte order of the machine. It begins with two copies of a
header, which differ while it is changed (https://www.sqlite.org/walformat.html#the_wal_index_file_format). The first
process that opens the file makes the index anew from the log, so it is looked at before.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

HEADER: Final = struct.Struct("=IIIBBHI28x")
"""Version, unused, change counter, is complete, byte order of checksums, page size, and frames in the log."""

VERSION: Final = 3_007_000


def committed_frames(database: Path) -> int:
    """The number of frames (one for each page of each commit) that the write-ahead log of a database must have.

    0 if there is no index, or if all frames have been copied into the database's file.
    """
    try:
        with Path(f"{database}-shm").open("rb") as index:
            header = index.read(2 * HEADER.size + 4)
    except FileNotFoundError:
        return 0
    if len(header) < 2 * HEADER.size + 4 or header[: HEADER.size] != header[HEADER.size : 2 * HEADER.size]:
        return 0
    version, _, _, is_complete, _, _, frames = HEADER.unpack_from(header)
    (in_file,) = struct.unpack_from("=I", header, 2 * HEADER.size)
    return int(frames) if version == VERSION and is_complete and frames > in_file else 0
