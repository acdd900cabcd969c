"""A call's condition on a variable's value, such as `verdict == "yes"`: the call is skipped unless it holds."""

from __future__ import annotations

import re
from typing import Final, Literal, cast

import msgspec

from plait.gateway.ids import VARIABLE_NAME

Operator = Literal["==", "!=", "contains"]

ACCEPTED: Final = 'NAME == "TEXT", NAME != "TEXT" or NAME contains "TEXT" (a JSON string; "" only with == and !=)'
"""The forms of a condition, for error messages."""

_CONDITION: Final = re.compile(rf'({VARIABLE_NAME.pattern})(?:\s*(==|!=)|\s+(contains))\s*("(?:[^"\\]|\\.)*")')
_SHOWN_CHARACTERS = 80


class Condition(msgspec.Struct, frozen=True):
    """Compares the value of `variable` with `text`, both without the white space around them."""

    variable: str
    operator: Operator
    text: str

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN_CHARACTERS else f"{self.text[:_SHOWN_CHARACTERS]}..."
        return f"{self.variable} {self.operator} {msgspec.json.encode(text).decode()}"

    def holds(self, value: str) -> bool:
        match self.operator:
            case "==":
                return value.strip() == self.text.strip()
            case "!=":
                return value.strip() != self.text.strip()
            case "contains":
                return self.text.strip() in value


def read_condition(raw: object) -> Condition | None:
    """The condition that a client wrote; None if it has none of the forms of `ACCEPTED`."""
    found = _CONDITION.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if found is None:
        return None
    try:
        text = msgspec.json.decode(found[4], type=str)
    except msgspec.DecodeError:
        return None
    operator = cast("Operator", found[2] or found[3])
    return None if operator == "contains" and not text.strip() else Condition(found[1], operator, text)
