"""The errors of transforms: an invalid specification, or a text that its transform refuses."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable

from plait.backends.errors import CallerError, PlaitError

_EXCERPT_CHARACTERS = 200


class TransformSpecError(CallerError, ValueError, code="invalid_transform"):
    """An invalid specification.

    `position` is the offset of the fault in characters. `expected` says what belongs there. `nearest` is the known name
    that is closest to the given one.
    """

    def __init__(self, found: str, *, position: int, expected: str, nearest: str | None = None) -> None:
        hint = f"; did you mean {nearest}?" if nearest is not None else ""
        super().__init__(f"transform, character {position + 1}: {found}; expected {expected}{hint}")
        self.found = found
        self.position = position
        self.expected = expected
        self.nearest = nearest


class TransformError(PlaitError, status=422, kind="transform_error", code="transform_failed"):
    """A transform refused its text, so the variable fails.

    `step` is the failed transform of the chain, in canonical form. `reason` says why it refused. `text` is its whole
    text; the message has only the beginning.
    """

    def __init__(self, step: str, reason: str, text: str) -> None:
        super().__init__(f"transform {excerpt(step)}: {reason}; the text was {quoted(text)}")
        self.step = step
        self.reason = reason
        self.text = text


class RejectedTextError(Exception):
    """Raised by a step that refuses its text. The chain adds the step and the text."""


class ParameterError(Exception):
    """Raised by a step that cannot be built, because the value of `parameter` is invalid."""

    def __init__(self, parameter: str, found: str, *, expected: str, nearest: str | None = None) -> None:
        super().__init__(f"{parameter}: {found}; expected {expected}")
        self.parameter = parameter
        self.found = found
        self.expected = expected
        self.nearest = nearest


def excerpt(text: str) -> str:
    """A text's beginning. Lone surrogates become escapes, so that any encoder takes it."""
    short = text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def quoted(text: str) -> str:
    """A text's beginning in quotes, on one line."""
    return json.dumps(excerpt(text), ensure_ascii=False)


def place(text: str, offset: int) -> str:
    """An offset in a text as line and column, counted from 1."""
    line = text.count("\n", 0, offset) + 1
    line_start = text.rfind("\n", 0, offset) + 1
    return f"line {line}, column {offset - line_start + 1}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is closest to `name`; None if none is close."""
    return next(iter(difflib.get_close_matches(name[:64], list(known), n=1)), None)
