"""A chain of transforms, which `parse` returns, and its steps. It turns a completion into a variable's value."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from plait.gateway.transforms.errors import RejectedTextError, TransformError

# A value that needs no quotes in a specification, so that most canonical forms read as people write them.
_BARE = re.compile(r"[\w$.\[\]*:@+-]+(?: [\w$.\[\]*:@+-]+)*")


class Kind(Enum):
    """The type of a parameter's value, and so its form in a specification."""

    TEXT = auto()
    TEXTS = auto()
    """One or more texts. Positional, it takes all arguments that follow."""
    FLAG = auto()
    """`true` or `false`. It is given by name only. The default is false."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a transform; the field of the same name holds its value."""

    name: str
    kind: Kind = Kind.TEXT
    required: bool = True


@dataclass(frozen=True, slots=True)
class Step(ABC):
    """One transform. Its constructor raises `ParameterError` for values that it cannot take."""

    name: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]] = ()

    @abstractmethod
    def convert(self, text: str) -> Iterator[str]:
        """Yield the result in pieces, so that a result above its limit is stopped early.

        Raises `RejectedTextError` with a reason that helps the prompt's author.
        """

    def __str__(self) -> str:
        """The canonical form: it parses back to an equal step."""
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
