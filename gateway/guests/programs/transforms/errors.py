"""The errors of transforms: an invalid specification, or a text that a transform cannot convert."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable

from plait.backends.errors import CallerError, PlaitError

_EXCERPT_CHARACTERS = 200


class TransformSpecError(CallerError, ValueError, code="invalid_transform"):
    """An invalid specification.

    `found` describes the fault, `position` is its offset in characters, and `expected` says what belongs there.
    `nearest` is the known name that is closest to an unknown one; None: no name is close.
    """

    def __init__(self, found: str, position: int, expected: str, nearest: str | None = None) -> None:
        hint = f"; did you mean {nearest}?" if nearest is not None else ""
        super().__init__(f"transform, character {position + 1}: {found}; expected {expected}{hint}")
        self.found, self.position, self.expected, self.nearest = found, position, expected, nearest


class TransformError(PlaitError, status=422, kind="transform_error", code="transform_failed"):
    """A transform cannot convert its text, so the semantic variable fails.

    `step` is the failed step of the chain, in canonical form. `reason` says why it failed. `text` is the whole text
    that the step got; the message has only the beginning.
    """

    def __init__(self, step: str, reason: str, text: str) -> None:
        super().__init__(f"transform {excerpt(step)}: {reason}; the text was {quoted(text)}")
        self.step = step
        self.reason = reason
        self.text = text


class RejectedTextError(Exception):
    """Raised by a step that cannot convert its text. `Transform.apply` makes a `TransformError` of it."""


class ParameterError(Exception):
    """Raised by a transform, because the value of `parameter` is invalid. `build` adds the position."""

    def __init__(self, parameter: str, found: str, expected: str, nearest: str | None = None) -> None:
        super().__init__(f"{parameter}: {found}; expected {expected}")
        self.parameter, self.found, self.expected, self.nearest = parameter, found, expected, nearest


def excerpt(text: str) -> str:
    """A text's beginning. Half of a surrogate pair becomes an escape, because UTF-8 cannot encode it."""
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
    # Cut, because a client chooses the name, and difflib takes more than linear time.
    return next(iter(difflib.get_close_matches(name[:64], list(known), n=1)), None)
