"""How many values a JSON document has and how deep it nests, from its bytes.

Decoding takes time for each value, and nothing else runs meanwhile. So a document with too many is refused before.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from itertools import accumulate
from typing import Final

MAX_CONTAINERS: Final = 50_000
"""Arrays and objects, some 2 microseconds each. 10,000 messages with parts and tool calls have 40,000."""
MAX_STRINGS: Final = 200_000
"""Strings, some 0.2 microseconds each. Each message has four or more: the names of its fields, and their values."""
MAX_VALUES: Final = 1_000_000
"""Commas, some 0.1 microseconds for each number. They are the token ids of a prompt: a context has at most as many."""

_TO_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_OTHERS: Final = bytes(set(range(256)) - set(b'[]{}",'))
_STEPS: Final = bytes.maketrans(b"[]", b"\x01\xff")
"""Of the depth, as signed bytes."""


class Excess(StrEnum):
    """What a document has too much of; the value is the `code` of the error."""

    LEVELS = "json_too_deep"
    VALUES = "json_too_many_values"


def excess_of(document: bytes, levels: int) -> Excess | None:
    """What is too much: more than `levels` arrays and objects in each other, or more values than the bounds above.

    The document need not be valid JSON. One with few brackets, quotes and commas is only searched for them.
    """
    if (
        document.count(b"[") + document.count(b"{") <= levels
        and document.count(b'"') <= 2 * MAX_STRINGS
        and document.count(b",") <= MAX_VALUES
    ):
        return None
    structure = _without_escapes(document)
    if structure.count(b'"') > 2 * MAX_STRINGS:
        return Excess.VALUES
    structure = b"".join(structure.split(b'"')[::2])  # without strings
    brackets = structure.replace(b",", b"")
    if max(accumulate(array("b", brackets[: 2 * MAX_CONTAINERS].translate(_STEPS))), default=0) > levels:
        return Excess.LEVELS
    if brackets.count(b"[") > MAX_CONTAINERS or len(structure) - len(brackets) > MAX_VALUES:
        return Excess.VALUES
    return None


def _without_escapes(document: bytes) -> bytes:
    """The quotes that begin and end strings, and all brackets and commas."""
    return document.replace(rb"\\", b"").replace(rb"\"", b"").translate(_TO_SQUARE, _OTHERS)
