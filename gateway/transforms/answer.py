"""Transforms that read one of a few possible answers: yes or no, or one of several options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from plait.gateway.transforms.errors import ParameterError, RejectedTextError, excerpt, quoted
from plait.gateway.transforms.step import Kind, Parameter, Step

_WORD = re.compile(r"\w+")

_TRUE = frozenset({"yes", "true"})
_FALSE = frozenset({"no", "false"})


@dataclass(frozen=True, slots=True)
class Boolean(Step):
    """`true` if the text has the word yes or true, `false` if it has no or false. Another word for each may be given.

    Words are whole words in any case. The sentence's meaning is not considered: "not true" has the word true.
    """

    name: ClassVar[str] = "boolean"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("true", required=False),
        Parameter("false", required=False),
    )

    true: str | None = None
    false: str | None = None

    def __post_init__(self) -> None:
        if self.true is None and self.false is None:
            return
        for parameter, word in (("true", self.true), ("false", self.false)):
            if word is None:
                raise ParameterError(parameter, "one word only", expected="one for true and one for false")
            if not _WORD.fullmatch(word):
                raise ParameterError(parameter, quoted(word), expected="one word of letters, digits or _")
        if self._words(self.true, _TRUE) == self._words(self.false, _FALSE):
            raise ParameterError("false", f"{quoted(self.false or '')} for both", expected="a different word for each")

    def convert(self, text: str) -> Iterator[str]:
        """Fails if the text has words for both answers, or for neither."""
        words = {word.casefold() for word in _WORD.findall(text)}
        true, false = self._words(self.true, _TRUE), self._words(self.false, _FALSE)
        if words & true and words & false:
            both = " and ".join(f'"{word}"' for word in sorted(words & (true | false)))
            raise RejectedTextError(f"{both} occur in the text: the answer is ambiguous")
        if not words & (true | false):
            neither = ", ".join(f'"{word}"' for word in sorted(true | false))
            raise RejectedTextError(f"none of {excerpt(neither)} occurs in the text")
        yield "true" if words & true else "false"

    @staticmethod
    def _words(own: str | None, usual: frozenset[str]) -> frozenset[str]:
        return usual if own is None else frozenset({own.casefold()})


@dataclass(frozen=True, slots=True)
class OneOf(Step):
    """One of the options: the text without the white space around it must be equal to an option.

    With `ignore_case` the text may be in any case. The result is the option as it was given.
    """

    name: ClassVar[str] = "enum"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("options", Kind.TEXTS),
        Parameter("ignore_case", Kind.FLAG, required=False),
    )

    options: tuple[str, ...]
    ignore_case: bool = False

    def __post_init__(self) -> None:
        for option in self.options:
            if not option or option != option.strip():
                raise ParameterError("options", quoted(option), expected="an option without white space around it")
        if len({self._key(option) for option in self.options}) < len(self.options):
            raise ParameterError("options", "an option given twice", expected="each option once")

    def convert(self, text: str) -> Iterator[str]:
        """Fails if the text is none of the options."""
        options = {self._key(option): option for option in self.options}
        chosen = options.get(self._key(text.strip()))
        if chosen is None:
            raise RejectedTextError(f"the text is none of {excerpt(', '.join(self.options))}")
        yield chosen

    def _key(self, text: str) -> str:
        return text.casefold() if self.ignore_case else text
