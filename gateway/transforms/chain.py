"""A chain of transforms: what `parse` returns and a semantic variable's value runs through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plait.gateway.transforms.errors import RejectedTextError, TransformError
from plait.gateway.transforms.step import Step

MAX_RESULT_BYTES = 1 << 20
"""1 MiB of UTF-8, some 250,000 tokens: longer than any context that a value could be put into."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One or more steps, each of which takes what the one before it made."""

    steps: tuple[Step, ...]

    def apply(self, text: str, *, max_bytes: int = MAX_RESULT_BYTES) -> str:
        """The text after all steps, none of whose results may exceed `max_bytes` of UTF-8.

        Raises `TransformError` and nothing else, whatever the text is.
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
    """A text's length as UTF-8, which half of a surrogate pair has not."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise RejectedTextError(f"\\u{ord(text[error.start]):04x} is half of a surrogate pair") from None
