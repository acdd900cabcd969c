"""How many values a JSON document has, how deep it nests and whether it is Unicode, from its bytes.

Decoding takes time for each value, and nothing else runs meanwhile. So a document with too many is refused before.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterator
from enum import StrEnum
from itertools import accumulate
from typing import Final

MAX_CONTAINERS: Final = 50_000
"""Arrays and objects, some 2 microseconds each. 10,000 messages with parts and tool calls have 40,000."""
MAX_STRINGS: Final = 200_000
"""Strings, some 0.2 microseconds each. Each message has four or more: the names of its fields, and their values."""
MAX_VALUES: Final = 1_000_000
"""Commas, some 0.1 microseconds for each number. They are the token ids of a prompt: a context has at most as many."""

PART_BYTES: Final = 256 * 1024
"""Looked at in some 5 ms. A document that has too many values shows it in its first parts."""

_TO_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_OTHERS: Final = bytes(set(range(256)) - set(b'[]{}",'))
_MARKS: Final = (b'"', b"[", b"]", b"{", b"}")
_STEPS: Final = bytes.maketrans(b"[]", b"\x01\xff")
"""Of the depth, as signed bytes."""


class Excess(StrEnum):
    """What a document has too much of; the value is the `code` of the error."""

    LEVELS = "json_too_deep"
    VALUES = "json_too_many_values"


def excess_of(document: bytes, levels: int, part_bytes: int = PART_BYTES) -> Excess | None:
    """What is too much: more than `levels` arrays and objects in each other, or more values than the bounds above.

    The document need not be valid JSON. One with few brackets, quotes and commas is only searched for them. Another is
    looked at in parts of `part_bytes`, up to the first that is too much.
    """
    if len(document) <= MAX_STRINGS and document.count(b"[") + document.count(b"{") <= levels:
        return None  # it is too short for too many strings or values
    if _has_few(document, levels, part_bytes):
        return None
    scan = _Scan()
    for part in _parts(document, part_bytes):
        scan.add(part)
        if scan.deepest > levels:
            return Excess.LEVELS
        if scan.containers > MAX_CONTAINERS or scan.quotes > 2 * MAX_STRINGS or scan.commas > MAX_VALUES:
            return Excess.VALUES
    return None


def check_unicode(document: bytes | bytearray, part_bytes: int = PART_BYTES) -> None:
    """Raises `UnicodeDecodeError` for bytes that are not UTF-8, also where a decoder would not look: in unread keys."""
    if document.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(document), part_bytes):  # as one text it could take four times its size
        decoder.decode(document[begin : begin + part_bytes])
    decoder.decode(b"", final=True)


def _has_few(document: bytes, levels: int, part_bytes: int) -> bool:
    """Whether a document has few brackets, quotes and commas, also counting those within strings."""
    brackets = quotes = commas = 0
    for begin in range(0, len(document), part_bytes):
        end = begin + part_bytes
        brackets += document.count(b"[", begin, end) + document.count(b"{", begin, end)
        quotes += document.count(b'"', begin, end)
        commas += document.count(b",", begin, end)
        if brackets > levels or quotes > 2 * MAX_STRINGS or commas > MAX_VALUES:
            return False
    return True


class _Scan:
    """Counts what was seen so far, outside strings. `deepest` is right as long as the containers are not too many."""

    def __init__(self) -> None:
        self.containers = self.quotes = self.commas = self.deepest = 0
        self._depth = 0

    def add(self, part: bytes) -> None:
        """Go on with the next part of the document. No part ends within an escape."""
        if not any(mark in part for mark in _MARKS):  # inside a long string, or an array of numbers
            self.commas += 0 if self.quotes % 2 else part.count(b",")
            return
        structure = part.replace(rb"\\", b"").replace(rb"\"", b"").translate(_TO_SQUARE, _OTHERS)
        between = structure.split(b'"')
        outside = b"".join(between[self.quotes % 2 :: 2])
        brackets = outside.replace(b",", b"")
        self.quotes += len(between) - 1
        self.containers += brackets.count(b"[")
        self.commas += len(outside) - len(brackets)
        steps = array("b", brackets[: 2 * MAX_CONTAINERS].translate(_STEPS))
        depths = list(accumulate(steps, initial=self._depth))
        self._depth, self.deepest = depths[-1], max(self.deepest, *depths)


def _parts(document: bytes, size: int) -> Iterator[bytes]:
    begin = 0
    while begin < len(document):
        part = document[begin : begin + size]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = document[begin : begin + size + 1]
        yield part
        begin += len(part)
