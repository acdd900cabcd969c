"""Replaces numbers that JSON lacks and Python's encoder still writes: `NaN`, `Infinity` and `-Infinity`.

Engines send them as the logprob of an impossible token. Decoders refuse the whole document because of them.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

_CONSTANTS: Final = (b"NaN", b"Infinity")
_NUMBERS: Final = {"-Infinity": -9999.0}
"""OpenAI's logprob of an impossible token. The other constants become null."""


def without_constants(document: bytes | bytearray) -> bytes | None:
    """The document with numbers, or null, for these constants. None if it has none, or is no JSON without them."""
    if not any(constant in document for constant in _CONSTANTS):
        return None
    found = list[str]()

    def number(constant: str) -> float | None:
        found.append(constant)
        return _NUMBERS.get(constant)

    try:
        read = json.loads(document, parse_constant=number)
        return msgspec.json.encode(read) if found else None  # texts may have these words
    except (ValueError, RecursionError):
        return None
