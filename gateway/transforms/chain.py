"""A chain of transforms, which `parse` returns. It turns a completion into a variable's value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plait.gateway.transforms.errors import RejectedTextError, TransformError
from plait.gateway.transforms.step import Step

MAX_RESULT_BYTES = 1 << 20
"""1 MiB of UTF-8, some 250,000 tokens: longer than any context that a value could be put into."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One or more steps. Each takes the result of the step before it."""

    steps: tuple[Step, ...]

    def apply(self, text: str, *, max_bytes: int = MAX_RESULT_BYTES) -> str:
        """The text after all steps. No step's result may exceed `max_bytes` of UTF-8.

        Raises only `TransformError`, for any text.
        """
        for step in self.steps:
            try:
                _size_bytes(text)
                text = _joined(step.convert(text), max_bytes)
            except RejectedTextError as error:
                raise TransformError(str(step), str(error), text) from None
        return text

    def __str__(self) -> str:
        """The canonical form: it parses back to an equal chain."""
        return " | ".join(map(str, self.steps))


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
