"""Turns LangChain's output parsers into transforms for the gateway, and functions that read the value at the end."""

from __future__ import annotations

import json
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

from plait.client.variable import Read

_LISTS: dict[type, str] = {
    CommaSeparatedListOutputParser: "list(comma)",
    NumberedListOutputParser: "list(numbered)",
    MarkdownListOutputParser: "list(bulleted)",
}


@dataclass(frozen=True, slots=True)
class ReadParser:
    """A parser's replacement. `read` turns the variable's text into LangChain's result; None: the text is the result.

    The gateway applies `transforms`. If they do not do all that the parser does, `complete` is False: only the client
    has the result, so no other call can take it.
    """

    name: str
    transforms: str | None = None
    read: Read | None = None
    complete: bool = True


def read_parser(parser: BaseOutputParser[Any]) -> ReadParser:
    """Read a parser. A subclass of a known parser counts as unknown, since it may parse in another way."""
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
    """The transforms that return the root element without the text around it."""
    around = json.dumps(f"<{root}>{{{{value}}}}</{root}>")
    return f"xml({json.dumps(root)}) | template({around})"
