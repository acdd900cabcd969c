"""The transform that finds the one integer in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from plait.gateway.transforms.errors import RejectedTextError, excerpt, quoted
from plait.gateway.transforms.step import Step

_SEPARATOR = r",_'\u2019\u00a0\u202f\u2009"
"""Separators of thousands: comma, underscore, apostrophes, no-break and thin spaces. A point is a decimal point."""

# Latin letters only: in scripts without spaces, numbers stand next to letters.
_LETTER = r"0-9A-Za-z_\u00c0-\u024f"

# A whole number, unless it is part of a word such as x86, 2nd or v1.2. A hyphen after a word is not a minus sign.
_NUMBER = re.compile(
    rf"(?:(?<![{_LETTER})+\-\u2212])(?P<sign>[-+\u2212]))?[$\u20ac\u00a3\u00a5]?"
    rf"(?P<digits>(?:(?<![{_LETTER}.])\.)?(?<![{_LETTER}])(?<![0-9][.{_SEPARATOR}])"
    rf"[0-9]++(?:[.{_SEPARATOR}][0-9]++)*+)(?![{_LETTER}])"
)
_GROUPED = re.compile(rf"[0-9]{{1,3}}([{_SEPARATOR}])[0-9]{{3}}(?:\1[0-9]{{3}})*+")

_NAMED_INTEGERS = 5


@dataclass(frozen=True, slots=True)
class Integer(Step):
    """The one integer in a text, in decimal digits without separators. It may occur several times."""

    name: ClassVar[str] = "integer"

    def convert(self, text: str) -> Iterator[str]:
        """Fails if there is no number, a number that is not an integer, or more than one integer."""
        found = list(dict.fromkeys(map(_integer, _NUMBER.finditer(text))))
        if not found:
            raise RejectedTextError("there is no separate integer")
        if len(found) > 1:
            named = ", ".join(map(excerpt, found[:_NAMED_INTEGERS])) + (" ..." if len(found) > _NAMED_INTEGERS else "")
            raise RejectedTextError(f"which of {len(found)} integers is meant: {named}?")
        yield found[0]


def _integer(number: re.Match[str]) -> str:
    """The integer's digits only. They are not parsed as a number: that would take quadratic time."""
    written = number["digits"]
    if not written.isdecimal() and not _GROUPED.fullmatch(written):
        raise RejectedTextError(f"{quoted(number[0])} is not an integer")
    digits = "".join(filter(str.isdecimal, written)).lstrip("0") or "0"
    return f"-{digits}" if number["sign"] in {"-", "\u2212"} and digits != "0" else digits
