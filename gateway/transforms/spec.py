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

from plait.gateway.transforms.binding import A_TRANSFORM, Argument, build
from plait.gateway.transforms.chain import Step, Transform
from plait.gateway.transforms.errors import TransformSpecError, quoted

MAX_STEPS = 16
MAX_SPEC_CHARACTERS = 16_384
"""The limit of a specification and of its canonical form, and so of a step's work for each character of text."""

_NAME = re.compile(r"[A-Za-z0-9_]+")
_PARAMETER = re.compile(r"([a-z_]+)\s*=")
_BARE = re.compile(r"""[^,()|"']*""")
_STRING = json.JSONDecoder(strict=False)  # a string may contain line breaks


def parse(spec: str) -> Transform:
    """Parse a specification. Raises `TransformSpecError`, which is a `ValueError`."""
    steps = _SpecReader(spec).chain()
    _check_limit(len(steps), MAX_STEPS, "transforms")
    transform = Transform(tuple(steps))
    _check_limit(len(str(transform)), MAX_SPEC_CHARACTERS, "characters")
    return transform


def _check_limit(count: int, most: int, things: str) -> None:
    if count > most:
        raise TransformSpecError(f"{count:,} {things}", position=0, expected=f"{most:,} at most")


class _SpecReader:
    """Reads one specification from left to right. `_at` is the offset of the next character."""

    def __init__(self, text: str) -> None:
        _check_limit(len(text), MAX_SPEC_CHARACTERS, "characters")
        self._text = text
        self._at = 0

    def chain(self) -> list[Step]:
        steps = [self._step()]
        while self._next():
            self._take("|", 'another transform after "|", or the end')
            steps.append(self._step())
        return steps

    def _step(self) -> Step:
        self._skip_space()
        start = self._at
        name = self._match(_NAME)
        if not name:
            raise self._unexpected(A_TRANSFORM)
        arguments: list[Argument] = []
        if self._next() == "(":
            self._at += 1
            arguments = self._arguments()
        return build(name, arguments, start=start, end=self._at)

    def _arguments(self) -> list[Argument]:
        """Read up to and including the closing parenthesis."""
        if self._next() == ")":
            self._at += 1
            return []
        arguments = [self._argument()]
        while self._next() != ")":
            self._take(",", 'a comma or ")"; quotes go around a value that has any of , ( ) | \' "')
            arguments.append(self._argument())
        self._at += 1
        return arguments

    def _argument(self) -> Argument:
        self._skip_space()
        named = _PARAMETER.match(self._text, self._at)
        if named is not None:
            self._at = named.end()
            self._skip_space()
        start = self._at
        return Argument(self._value(), start, named[1] if named is not None else None)

    def _value(self) -> str:
        match self._next():
            case '"':
                return self._string()
            case "'":
                return self._literal()
        value = self._match(_BARE).strip()
        if not value:
            raise self._unexpected("a value")
        return value

    def _string(self) -> str:
        try:
            value, self._at = _STRING.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            expected = "a string as JSON has it; between single quotes a backslash is a backslash"
            raise TransformSpecError(error.msg.lower(), position=error.pos, expected=expected) from None
        return str(value)

    def _literal(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise TransformSpecError("a quote that is not closed", position=self._at, expected="' after the value")
        value = self._text[self._at + 1 : end]
        self._at = end + 1
        return value

    def _next(self) -> str:
        """Skip white space. Returns the next character without reading it; empty at the end."""
        self._skip_space()
        return self._text[self._at : self._at + 1]

    def _take(self, character: str, expected: str) -> None:
        if self._next() != character:
            raise self._unexpected(expected)
        self._at += 1

    def _skip_space(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found is not None else self._at
        return found[0] if found is not None else ""

    def _unexpected(self, expected: str) -> TransformSpecError:
        found = self._next()
        return TransformSpecError(quoted(found) if found else "the end", position=self._at, expected=expected)
