"""What an iteration computes, summed up for those who learn from its time."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class IterationWork(NamedTuple):
    """Sums over the calls of an iteration. A call with one new token is a decode, one with more computes a chunk.

    `sequence_tokens` are new and context tokens. `chunks` are the new tokens of each chunk. `chunk_products` sums the
    products of each chunk's new and sequence tokens.
    """

    new_tokens: int = 0
    sequence_tokens: int = 0
    decodes: int = 0
    chunks: tuple[int, ...] = ()
    chunk_products: int = 0

    @classmethod
    def of(cls, new_tokens: Collection[int], context_tokens: Collection[int]) -> IterationWork:
        """The work of calls, given as the new tokens and the context tokens of each."""
        chunks = [(new, context) for new, context in zip(new_tokens, context_tokens, strict=True) if new > 1]
        total = sum(new_tokens)
        return cls(
            new_tokens=total,
            sequence_tokens=total + sum(context_tokens),
            decodes=len(new_tokens) - len(chunks),
            chunks=tuple(new for new, _ in chunks),
            chunk_products=sum(new * (new + context) for new, context in chunks),
        )
