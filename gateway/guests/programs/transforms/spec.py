"""Parses a specification into a chain of transforms. A client writes one after `transform=` in `plait-output`.

chain     = step *( "|" step )
step      = name [ "(" [ argument *( "," argument ) ] ")" ]
argument  = [ parameter "=" ] ( string | literal | bare )
string    = as in JSON, in double quotes
literal   = anything but ' in single quotes, where a backslash is a backslash
bare      = anything but , ( ) | and quotes, without the white space around it
"""

from __future__ import annotations

import json
import re

from plait.gateway.guests.programs.transforms.binding import A_TRANSFORM, Argument, build
from plait.gateway.guests.programs.transforms.chain import Step, Transform
from plait.gateway.guests.programs.transforms.errors import TransformSpecError, quoted

MAX_STEPS = 16
MAX_SPEC_CHARACTERS = 16_384
"""The limit of a specification and of its canonical form, and so of a step's work for each character of text."""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z0-9_]+")
_PARAMETER = re.compile(r"([a-z_]+)\s*=\s*")
_LITERAL = re.compile(r"'([^']*)'")
_BARE = re.compile(r"""([^,()|"']*[^,()|"'\s])""")
_STRING = json.JSONDecoder(strict=False)  # a string may contain line breaks
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def parse(spec: str) -> Transform:
    """Parse a specification. Raises `TransformSpecError`, which is a `ValueError`."""
    _check_limit(len(spec), MAX_SPEC_CHARACTERS, "characters")
    steps = _SpecReader(spec).chain()
    _check_limit(len(steps), MAX_STEPS, "transforms")
    transform = Transform(tuple(steps))
    _check_limit(len(str(transform)), MAX_SPEC_CHARACTERS, "characters")
    return transform


def _check_limit(count: int, most: int, things: str) -> None:
    if count > most:
        raise TransformSpecError(f"{count:,} {things}", 0, f"{most:,} at most")


class _SpecReader:
    """Reads one specification from left to right. `_at` is the offset of the next character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def chain(self) -> list[Step]:
        steps = [self._step()]
        while self._next():
            self._expect("|", 'another transform after "|", or the end')
            steps.append(self._step())
        return steps

    def _step(self) -> Step:
        self._next()
        start = self._at
        name = self._match(_NAME)
        if name is None:
            raise self._unexpected(A_TRANSFORM)
        arguments = self._arguments() if self._take("(") else []
        return build(name[0], arguments, start=start, end=self._at)

    def _arguments(self) -> list[Argument]:
        """Read up to and including the closing parenthesis."""
        if self._take(")"):
            return []
        arguments = [self._argument()]
        while not self._take(")"):
            self._expect(",", 'a comma or ")"; quotes go around a value that has any of , ( ) | \' "')
            arguments.append(self._argument())
        return arguments

    def _argument(self) -> Argument:
        self._next()
        parameter = self._match(_PARAMETER)
        start = self._at
        value = self._value()
        if _SURROGATE.search(value):
            raise TransformSpecError("half of a surrogate pair", start, "valid Unicode text")
        return Argument(value, start, parameter and parameter[1])

    def _value(self) -> str:
        if self._text.startswith('"', self._at):
            try:
                value, self._at = _STRING.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                expected = "a string as JSON has it; between single quotes a backslash is a backslash"
                raise TransformSpecError(error.msg.lower(), error.pos, expected) from None
            return str(value)
        found = self._match(_LITERAL) or self._match(_BARE)
        if found is None and self._next() == "'":
            raise TransformSpecError("a quote that is not closed", self._at, "' after the value")
        if found is None:
            raise self._unexpected("a value")
        return found[1]

    def _next(self) -> str:
        """Skip white space. Returns the next character without reading it; empty at the end."""
        self._match(_SPACE)
        return self._text[self._at : self._at + 1]

    def _take(self, character: str) -> bool:
        """Read the character if it is the next one."""
        is_next = self._next() == character
        self._at += is_next
        return is_next

    def _expect(self, character: str, expected: str) -> None:
        if not self._take(character):
            raise self._unexpected(expected)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _unexpected(self, expected: str) -> TransformSpecError:
        found = self._next()
        return TransformSpecError(quoted(found) if found else "the end", self._at, expected)
