"""LangChain's output parsers as transforms in the gateway, and as what the program makes of the value at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_core.output_parsers import (
    BaseOutputParser,
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    MarkdownListOutputParser,
    NumberedListOutputParser,
    PydanticOutputParser,
    StrOutputParser,
    XMLOutputParser,
)

Read = Callable[[str], Any]

_LISTS: dict[type, str] = {
    CommaSeparatedListOutputParser: "list(comma)",
    NumberedListOutputParser: "list(numbered)",
    MarkdownListOutputParser: "list(bulleted)",
}


@dataclass(frozen=True, slots=True)
class ReadParser:
    """What stands for a parser. `read` makes LangChain's result of the variable's text; None: it is the text.

    `transforms` are what the gateway does; where they are not `complete`, only `read` knows what the parser does, so
    that its result is not there for another call.
    """

    name: str
    transforms: str | None = None
    read: Read | None = None
    complete: bool = True


def read_parser(parser: BaseOutputParser[Any]) -> ReadParser:
    """Classes that are derived from a known one may do anything, and count as unknown."""
    kind, name = type(parser), type(parser).__name__
    if kind is StrOutputParser:
        return ReadParser(name)
    if kind in _LISTS:
        return ReadParser(name, _LISTS[kind], json.loads)
    if kind in (JsonOutputParser, PydanticOutputParser):
        return ReadParser(name, "json", parser.parse)
    if isinstance(parser, XMLOutputParser) and kind is XMLOutputParser and parser.tags:
        return ReadParser(name, _element(parser.tags[0]), parser.parse)
    return ReadParser(name, None, parser.parse, complete=False)


def _element(root: str) -> str:
    """The root element with what is in it, and nothing around it."""
    around = json.dumps(f"<{root}>{{{{value}}}}</{root}>")
    return f"xml({json.dumps(root)}) | template({around})"
