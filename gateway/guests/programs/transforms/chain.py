"""A chain of transforms (`Transform`, which `parse` returns), and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from plait.gateway.guests.programs.transforms.errors import RejectedTextError, TransformError

Convert = Callable[[str], Iterator[str]]
"""Yields a text's result in pieces, so that `Transform.apply` can stop at the size limit.

Raises `RejectedTextError` if the text cannot be converted. Its message tells the prompt's author why.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One transform with the values of its parameters."""

    spec: str
    """The canonical form, of which `parse` makes an equal step."""

    convert: Convert = field(compare=False)


MAX_RESULT_BYTES = 1 << 20
"""1 MiB of UTF-8: some 250,000 tokens, more than the contexts of most models."""


@dataclass(frozen=True, slots=True)
class Transform:
    """A chain of one or more steps. Each step converts the result of the step before it."""

    steps: tuple[Step, ...]

    def apply(self, text: str, *, max_bytes: int = MAX_RESULT_BYTES) -> str:
        """Convert a text by all steps.

        Raises `TransformError` if a step rejects its text, or if its result exceeds `max_bytes` of UTF-8. No text
        raises any other error.
        """
        for step in self.steps:
            try:
                _size_bytes(text)  # called only to refuse half of a surrogate pair
                text = _joined(step.convert(text), max_bytes)
            except RejectedTextError as error:
                raise TransformError(step.spec, str(error), text) from None
        return text

    def __str__(self) -> str:
        """The canonical form, of which `parse` makes an equal chain."""
        return " | ".join(step.spec for step in self.steps)


def _joined(pieces: Iterable[str], max_bytes: int) -> str:
    kept, size_bytes = [], 0
    for piece in pieces:
        kept.append(piece)
        size_bytes += _size_bytes(piece)
        if size_bytes > max_bytes:
            raise RejectedTextError(f"the result is longer than {max_bytes:,} bytes")
    return "".join(kept)


def _size_bytes(text: str) -> int:
    """A text's length in bytes of UTF-8. Raises `RejectedTextError` for half of a surrogate pair."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise RejectedTextError(f"\\u{ord(text[error.start]):04x} is half of a surrogate pair") from None
