"""Transforms of a whole text: `strip` removes the white space around it, `template` puts words around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from plait.gateway.transforms.errors import ParameterError
from plait.gateway.transforms.step import Parameter, Step

_PLACEHOLDER = "{{value}}"


@dataclass(frozen=True, slots=True)
class Strip(Step):
    """The text without white space around it."""

    name: ClassVar[str] = "strip"

    def convert(self, text: str) -> Iterator[str]:
        """Never fails."""
        yield text.strip()


@dataclass(frozen=True, slots=True)
class Template(Step):
    """A given text with each `{{value}}` in it replaced by the value. Everything else in it is literal."""

    name: ClassVar[str] = "template"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("text"),)

    text: str

    def __post_init__(self) -> None:
        if _PLACEHOLDER not in self.text:
            raise ParameterError("text", "a template without a place for the value", expected=f"{_PLACEHOLDER} in it")

    def convert(self, text: str) -> Iterator[str]:
        """Never fails, but the result may be too long for the chain."""
        before, *rest = self.text.split(_PLACEHOLDER)
        yield before
        for part in rest:
            yield text
            yield part
