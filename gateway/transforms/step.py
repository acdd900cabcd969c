"""One transform of a chain: a frozen value that turns one text into another and knows its canonical form."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

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
