"""How deep a JSON document nests, from its bytes."""

from __future__ import annotations

import re
from typing import Final

_STRING: Final = re.compile(rb'"[^"]*"')
_TO_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_OTHERS: Final = bytes(set(range(256)) - set(b'[]{}"'))


def nests_deeper(document: bytes, levels: int) -> bool:
    """Whether arrays and objects are nested more than `levels` deep in a valid JSON document.

    Each round removes the innermost brackets, so it takes `levels` passes over the brackets at most. A document with
    few brackets, such as one with a long text or many token ids, is only searched for them.
    """
    if document.count(b"[") + document.count(b"{") <= levels:
        return False
    unescaped = document.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = _STRING.sub(b"", unescaped.translate(_TO_BRACKETS, _OTHERS))
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
