"""Embeddings of the emulated model: unit vectors that are near each other if the texts share tokens.

Each token adds 1 or -1 in a few places, which its hash chooses (a sparse random projection of the bag of tokens). So
equal inputs have equal vectors, and texts without a common token are nearly orthogonal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import sqrt
from typing import Final

DIMENSIONS: Final = 1024
"""Without `dimensions`, as many as current embedding models have. A request may ask for fewer."""
_PLACES: Final = 16


def embedding(token_ids: Sequence[int], dimensions: int = DIMENSIONS) -> list[float]:
    """A vector of length 1. There must be a token."""
    vector = [0.0] * dimensions
    for token, count in Counter(token_ids).items():
        for place, sign in _signs(token):
            vector[place % dimensions] += sign * count
    length = sqrt(sum(value * value for value in vector))
    if length == 0:  # the signs cancelled out, as can happen with one or two dimensions
        return [1.0, *vector[1:]]
    return [value / length for value in vector]


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))


@lru_cache(maxsize=100_000)
def _signs(token: int) -> tuple[tuple[int, int], ...]:
    """The places of a token, each with its sign."""
    digest = blake2b(token.to_bytes(8, "little"), digest_size=4 * _PLACES).digest()
    numbers = (int.from_bytes(digest[at : at + 4], "little") for at in range(0, len(digest), 4))
    return tuple((number >> 1, 1 if number & 1 else -1) for number in numbers)
