r"""Replaces lone halves of surrogate pairs in JSON by U+FFFD.

Programs whose strings are UTF-16 cut texts between the halves of a pair, and write each half as an escape, such as
`\ud83d`. A lone half is no character, so decoders refuse the whole document.
"""

from __future__ import annotations

import re
from typing import Final

_HALF: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F][0-9a-fA-F]{2})",
    re.DOTALL,
)
"""The escape of one half without the other. A backslash before it may be an escaped one: then it is text."""

_ANY_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of a half, with or without the other."""

_ENCODED_HALF: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
"""A half in UTF-8, which does not allow it either."""

_ESCAPED: Final = rb"\\"
_HIDDEN: Final = b"\xff\xff"  # no UTF-8 has it

_ENDS_WITH_FIRST: Final = re.compile(rb'\\u[dD][89abAB][0-9a-fA-F]{2}"')
"""A text that ends with the first half of a pair."""

_PARTED: Final = re.compile(
    rb'(\\u[dD][89abAB][0-9a-fA-F]{2})("[^\\\r\n]*(?:\r?\n){2}(?:[a-z]+:[^\\\r\n]*\r?\n)*[^\\\r\n]*")(?=\\u[dD][c-fC-F])'
)
"""A pair whose halves end the text of one event and begin that of the next."""


def has_half(document: bytes | bytearray) -> bool:
    """Whether a document may hold half a pair. One with an escaped backslash may, if it has any escape of a half."""
    if document.find(b"\\") >= 0:
        half = _HALF if document.find(_ESCAPED) < 0 else _ANY_HALF  # `_HALF` cannot tell `\\` before an escape
        if half.search(document) is not None:
            return True
    return not document.isascii() and _ENCODED_HALF.search(document) is not None


def with_whole_pairs(document: bytes | bytearray) -> bytes | bytearray:
    """The document with U+FFFD for each lone half, in the same length; the same object if it has none."""
    if document.find(b"\\") < 0 and document.isascii():  # as nearly all are
        return document
    if not has_half(document) or _HIDDEN in document:
        return document
    return _mended(document.replace(_ESCAPED, _HIDDEN)).replace(_HIDDEN, _ESCAPED)


def events_with_whole_pairs(events: bytes) -> bytes:
    """As `with_whole_pairs`, for whole events of a stream. A pair that two events split moves to the second one."""
    if _HIDDEN in events:
        return events
    joined = _PARTED.sub(rb"\2\1", events.replace(_ESCAPED, _HIDDEN))
    return _mended(joined).replace(_HIDDEN, _ESCAPED)


def may_go_on(event: bytes) -> bool:
    """Whether a text in the event ends with the first half of a pair, so that the next event may have the second."""
    return _ENDS_WITH_FIRST.search(event.replace(_ESCAPED, _HIDDEN)) is not None


def _mended(document: bytes | bytearray) -> bytes:
    return _ENCODED_HALF.sub(b"\xef\xbf\xbd", _HALF.sub(rb"\\ufffd", document))
