"""Keeps one GPU architecture's code in a compiled library, so that a library of 76 MB travels as one of 15.

A CUDA library has containers ("fat binaries"), each with the same kernels for several architectures. A container has a
head of 16 bytes (magic, version, size of the head, size of what follows) and then entries. An entry begins with its
kind (PTX or ELF), the size of its own head, and the size of its payload; its architecture is at byte 28.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

MAGIC: Final = b"\x50\xed\x55\xba"
VERSION: Final = 1
PTX: Final = 1

_HEAD: Final = struct.Struct("<4sHHQ")
_ENTRY: Final = struct.Struct("<HHIQ")
_SIZE_AT: Final = 8
_ARCHITECTURE_AT: Final = 28


class _Entry(NamedTuple):
    """The code of one architecture: 90 is Hopper's. `data` has the entry's head too."""

    kind: int
    architecture: int
    data: bytes


def pruned(library: bytes, architecture: int) -> bytes:
    """The library, of the same size, with the code that this architecture loads, and zeros in place of the rest.

    The kept entries are moved to the front of their container. Their offsets in the file change; those of the
    containers do not.
    """
    data, at = bytearray(library), 0
    while (at := data.find(MAGIC, at)) >= 0:
        size = _container_size(data, at)
        if size is None:
            at += len(MAGIC)
            continue
        begin, end = at + _HEAD.size, at + _HEAD.size + size
        kept = b"".join(entry.data for entry in _kept(list(_entries(data, begin, end)), architecture))
        data[begin:end] = kept + bytes(size - len(kept))
        struct.pack_into("<Q", data, at + _SIZE_AT, len(kept))
        at = end
    return bytes(data)


def _container_size(data: bytes | bytearray, at: int) -> int | None:
    """The size of what follows the container's head; None if these bytes are no container's."""
    if at + _HEAD.size > len(data):
        return None
    _, version, head_size, size = _HEAD.unpack_from(data, at)
    fits = at + head_size + size <= len(data)
    return int(size) if version == VERSION and head_size == _HEAD.size and fits else None


def _entries(data: bytes | bytearray, begin: int, end: int) -> Iterator[_Entry]:
    while begin < end:
        kind, _, head_size, payload_size = _ENTRY.unpack_from(data, begin)
        [architecture] = struct.unpack_from("<I", data, begin + _ARCHITECTURE_AT)
        size = head_size + payload_size
        yield _Entry(kind, architecture, bytes(data[begin : begin + size]))
        begin += size


def _kept(entries: list[_Entry], architecture: int) -> list[_Entry]:
    """The architecture's machine code; without it, the newest PTX it can compile; else the smallest entry.

    A container keeps at least one entry, because an empty one is not valid. That entry never loads.
    """
    own = [entry for entry in entries if entry.kind != PTX and entry.architecture == architecture]
    older = [entry for entry in entries if entry.kind == PTX and entry.architecture <= architecture]
    if own or not entries:
        return own
    if older:
        return [max(older, key=lambda entry: entry.architecture)]
    return [min(entries, key=lambda entry: len(entry.data))]
