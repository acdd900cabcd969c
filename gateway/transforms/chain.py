"""A chain of transforms (`Transform`, which `parse` returns), and the base class of its steps (`Step`)."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from plait.gateway.transforms.errors import RejectedTextError, TransformError

# Values that the canonical form writes without quotes, as people do.
_BARE = re.compile(r"[\w$.\[\]*:@+-]+(?: [\w$.\[\]*:@+-]+)*")


class Kind(Enum):
    """The type of a parameter's value."""

    TEXT = auto()
    TEXTS = auto()
    """One or more texts: all positional arguments that are left."""
    FLAG = auto()
    """`true` or `false` (the default), given by name only: `ignore_case=true`."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a transform. The step has a field of the same name for the value."""

    name: str
    kind: Kind = Kind.TEXT
    required: bool = True


@dataclass(frozen=True, slots=True)
class Step(ABC):
    """One transform with the values of its parameters. The constructor raises `ParameterError` for an invalid value."""

    name: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]] = ()

    @abstractmethod
    def convert(self, text: str) -> Iterator[str]:
        """Yield the result in pieces, so that `Transform.apply` can stop at the size limit.

        Raises `RejectedTextError` if the text cannot be converted. Its message tells the prompt's author why.
        """

    def __str__(self) -> str:
        """The canonical form, of which `parse` makes an equal step."""
        arguments = [text for parameter in self.parameters for text in self._written(parameter)]
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name

    def _written(self, parameter: Parameter) -> list[str]:
        value = getattr(self, parameter.name)
        if parameter.kind is Kind.FLAG:
            return [f"{parameter.name}=true"] if value else []
        if value is None:
            return []
        texts = value if parameter.kind is Kind.TEXTS else (value,)
        return [text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False) for text in texts]


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
                raise TransformError(str(step), str(error), text) from None
        return text

    def __str__(self) -> str:
        """The canonical form, of which `parse` makes an equal chain."""
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
