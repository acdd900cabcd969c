"""The transform that reads a model's list and returns a JSON array of texts."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from plait.gateway.transforms.errors import ParameterError, RejectedTextError, nearest, quoted
from plait.gateway.transforms.json_text import dump_json
from plait.gateway.transforms.step import Parameter, Step

_NUMBERED = re.compile(r"[ \t]*+[0-9]++[.)][ \t]++(.*\S)")
_BULLETED = re.compile(r"[ \t]*+[-*+][ \t]++(.*\S)")


def _comma_items(text: str) -> list[str]:
    """The items of all lines. An item in double quotes may contain commas; `""` in it is one quote."""
    lines = (f"{line.strip()}\n" for line in text.split("\n"))
    rows = csv.reader(lines, skipinitialspace=True, strict=True)
    try:
        return [item.strip() for row in rows for item in row if item.strip()]
    except csv.Error as error:
        raise RejectedTextError(f"this is not a comma-separated list ({error})") from None


def _numbered_items(text: str) -> list[str]:
    return _marked_items(text, _NUMBERED)


def _bulleted_items(text: str) -> list[str]:
    return [item for item in _marked_items(text, _BULLETED) if not _is_rule(item)]


def _marked_items(text: str, marked: re.Pattern[str]) -> list[str]:
    """The text after the marker on each line that has one. Other lines are skipped."""
    return [found[1] for line in text.split("\n") if (found := marked.match(line))]


def _is_rule(item: str) -> bool:
    """Whether the item is the rest of a horizontal rule such as `* * *`."""
    return len(item) > 1 and set(item) in ({"*", " "}, {"-", " "})


# For each style: the function that reads the items, and the reason to give when it finds none.
_STYLES: dict[str, tuple[Callable[[str], list[str]], str]] = {
    "comma": (_comma_items, "the text is empty"),
    "numbered": (_numbered_items, 'no line begins with a number such as "1." or "1)"'),
    "bulleted": (_bulleted_items, "no line begins with -, * or + and a space"),
}


@dataclass(frozen=True, slots=True)
class ItemList(Step):
    """A list in one of three styles, as a JSON array of texts."""

    name: ClassVar[str] = "list"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("style"),)

    style: str

    def __post_init__(self) -> None:
        if self.style not in _STYLES:
            hint = nearest(self.style, _STYLES)
            raise ParameterError("style", quoted(self.style), expected="comma, numbered or bulleted", nearest=hint)

    def convert(self, text: str) -> Iterator[str]:
        """Fails if there is no item: an answer that is not a list is not an empty list."""
        read, missing = _STYLES[self.style]
        items = read(text)
        if not items:
            raise RejectedTextError(f"there is no item in the list: {missing}")
        yield dump_json(items)
