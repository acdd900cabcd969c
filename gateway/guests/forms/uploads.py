"""Bodies with files: in memory while they are short, then on disk. Engines get the same bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from hashlib import blake2b
from io import FileIO
from tempfile import TemporaryFile
from typing import Final, Self

from plait.backends.errors import NoRoomForUploadError
from plait.backends.http.body import SLICE_BYTES

MEMORY_BYTES: Final = 2**20
"""The part of an upload that stays in memory. The rest goes to a temporary file, in pieces of this size."""


class Upload:
    """A body in memory and on disk. Its `with` block frees it; its temporary file has no name.

    `digest` is a hash of its bytes.
    """

    def __init__(self) -> None:
        self._size = 0
        self._memory = bytearray()
        self._file: FileIO | None = None
        self._sum = blake2b(digest_size=16)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return self._size

    @property
    def digest(self) -> bytes:
        return self._sum.digest()

    async def add(self, piece: bytes) -> None:
        """Append a piece. Raises `NoRoomForUploadError` if the disk is full."""
        self._size += len(piece)
        self._memory += piece
        self._sum.update(piece)
        if len(self._memory) > MEMORY_BYTES:
            await self._write()

    async def end(self) -> None:
        if self._file is not None:
            await self._write()

    def slices(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes of the upload or of a range, in slices. Recent bytes come from the page cache, not the disk."""
        end = self._size if end is None else end
        for at in range(begin, end, SLICE_BYTES):
            yield self._read(at, min(at + SLICE_BYTES, end))

    def _read(self, begin: int, end: int) -> bytes:
        if self._file is None:
            return bytes(self._memory[begin:end])
        return os.pread(self._file.fileno(), end - begin, begin)

    async def _write(self) -> None:
        """Runs in a thread, because a disk may be slow."""
        written, self._memory = self._memory, bytearray()
        try:
            await asyncio.to_thread(self._append, written)
        except OSError as error:
            raise NoRoomForUploadError from error

    def _append(self, data: bytearray) -> None:
        if self._file is None:
            self._file = TemporaryFile(buffering=0)  # noqa: SIM115 - closed with the upload
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
