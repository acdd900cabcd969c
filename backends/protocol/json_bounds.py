"""Bounds on JSON documents, judged from their bytes: how deep they nest, and how many values they have.

Decoding takes time for each value and blocks the event loop. So a document that nests too deep or has too many values
is refused before it is decoded.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

MAX_JSON_LEVELS: Final = 100
"""How deep arrays and objects nest. A tool's JSON schema has some 20 levels; each is a frame on Python's stack."""
MAX_CONTAINERS: Final = 50_000
"""Arrays and objects, some 2 microseconds each. 10,000 messages with parts and tool calls have 40,000."""
MAX_STRINGS: Final = 200_000
"""Strings, some 0.2 microseconds each. Each message has four or more: the names of its fields, and their values."""
MAX_VALUES: Final = 1_000_000
"""Commas, some 0.1 microseconds for each number. They are the token ids of a prompt: a context has at most as many."""

PART_BYTES: Final = 256 * 1024
"""How much is scanned at a time, in some 5 ms. A document with too many values is found out in its first parts."""

_TO_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_NO_MARKS: Final = bytes(set(range(256)) - set(b'[{",'))
_MARKS: Final = (b'"', b"[", b"]", b"{", b"}")
_STRING: Final = re.compile(rb'"(?:[^"]*+"(?<=\\"))*+[^"]*+(?:"|\Z)')
"""A string, or the beginning of one at the document's end. Escaped backslashes must have been removed before."""

_END: Final = b"\0"  # which no JSON has outside strings
_STEPS: Final = bytes.maketrans(b"[]", b"\x01\xff")
"""Each bracket becomes its change of the depth, +1 or -1, as a signed byte."""

_SHORT_BYTES: Final = 8_192
"""Counting is the fastest check of documents up to this length."""


class Excess(StrEnum):
    """A bound that a document exceeds; the value is the `code` of the error."""

    LEVELS = "json_too_deep"
    VALUES = "json_too_many_values"


def excess_of(document: bytes, levels: int, part_bytes: int = PART_BYTES) -> Excess | None:
    """The bound that a document exceeds: `levels` of nesting, or the counts above. None if it exceeds none.

    The document need not be valid JSON. Unless a quick check finds it within the bounds, it is scanned in parts of
    `part_bytes`, up to the part that exceeds one.
    """
    if len(document) <= _SHORT_BYTES and document.count(b"[") + document.count(b"{") <= levels:
        return None
    if _is_within(document, levels, part_bytes):
        return None
    scan = _Scan()
    for part in _parts(document, part_bytes):
        scan.add(part)
        if scan.deepest > levels:
            return Excess.LEVELS
        if scan.containers > MAX_CONTAINERS or scan.strings > MAX_STRINGS or scan.commas > MAX_VALUES:
            return Excess.VALUES
    return None


def _is_within(document: bytes, levels: int, part_bytes: int) -> bool:
    """Whether a quick check finds a document within the bounds. A False may be wrong, if strings have many marks."""
    opens_few = _opens_few(document, levels)
    short_bytes = 2 * (MAX_STRINGS if opens_few else MAX_CONTAINERS)  # each has two bytes or more
    if len(document) > short_bytes and not _has_few_marks(document, part_bytes):
        return False
    return opens_few or _nested(levels).fullmatch(document) is not None


def _opens_few(document: bytes, most: int) -> bool:
    """Whether at most `most` brackets open, counted in strings too, since prose has hardly any."""
    for bracket in (b"[", b"{"):
        at = document.find(bracket)
        while at >= 0:
            most -= 1
            if most < 0:
                return False
            at = document.find(bracket, at + 1)
    return True


def _has_few_marks(document: bytes, part_bytes: int) -> bool:
    """Whether brackets, quotes and commas are within the bounds, counted in strings too."""
    opened = quotes = commas = 0
    for begin in range(0, len(document), part_bytes):
        marks = document[begin : begin + part_bytes].translate(None, _NO_MARKS)
        opened += marks.count(b"[") + marks.count(b"{")
        quotes += marks.count(b'"')
        commas += marks.count(b",")
        if opened > MAX_CONTAINERS or quotes > 2 * MAX_STRINGS or commas > MAX_VALUES:
            return False
    return True


@lru_cache(maxsize=16)
def _nested(levels: int) -> Any:
    """The pattern of documents with at most `levels`: strings, other bytes, and brackets around one level less.

    RE2 matches with a finite automaton, in some 2 ns for each byte whatever the document is.
    """
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - few servers get documents that need it

    flat = rb'[^"\[\]{}]|"(?:[^"\\]|\\.)*"'
    pattern = rb"(?:%b)*" % flat
    for _ in range(levels):
        pattern = rb"(?:%b|[\[{]%b[\]}])*" % (flat, pattern)
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.dot_nl = options.never_capture = True
    return re2.compile(pattern, options)


class _Scan:
    """Counts marks outside strings, part by part. `deepest` is right while the containers are within their bound."""

    def __init__(self) -> None:
        self.containers = self.strings = self.commas = self.deepest = 0
        self._depth = 0
        self._in_string = False

    def add(self, part: bytes) -> None:
        """Scan the next part of the document. No part ends within an escape."""
        if not any(mark in part for mark in _MARKS):  # inside a long string, or an array of numbers
            self.commas += 0 if self._in_string else part.count(b",")
            return
        if rb'\\"' in part:
            part = part.replace(rb"\\", b"")
        begun = b'"' if self._in_string else b""
        outside, strings = _STRING.subn(b"", b"%b%b%b" % (begun, part, _END))
        self.strings += strings - self._in_string
        self._in_string = not outside.endswith(_END)  # a string that has not ended takes it, too
        brackets = outside.translate(_TO_SQUARE, _NO_BRACKETS)
        self.containers += brackets.count(b"[")
        self.commas += outside.count(b",")
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
