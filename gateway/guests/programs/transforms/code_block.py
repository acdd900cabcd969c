"""CommonMark's fenced code blocks, and the transform that extracts one from a text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from plait.gateway.guests.programs.transforms.chain import Convert
from plait.gateway.guests.programs.transforms.errors import ParameterError, RejectedTextError, excerpt, place, quoted

# A line that may open or close a block. No backtick may follow a fence of backticks: that would be inline code.
_FENCE = re.compile(r"^(?P<indent>[ \t]*+)(?P<fence>`{3,}+(?=[^`\n]*$)|~{3,}+)(?P<info>[^\n]*)$", re.MULTILINE)

_NAMED_BLOCKS = 5


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `text[start:end]` is its content, still indented as in the text.

    `language` is the first word of the info string, in lower case. `indent` is the white space before the opening
    fence, `opened` the fence's offset. A block that is not `closed` runs to the end of the text.
    """

    language: str
    indent: str
    opened: int
    start: int
    end: int
    closed: bool


def fenced_blocks(text: str) -> Iterator[Block]:
    """The blocks of a text in order.

    A block ends at a fence of the same character that is at least as long, so that a block may contain shorter fences.
    A fence may have any indentation, because blocks in list items are indented. CommonMark allows at most three columns
    more than the item has.
    """
    opening: re.Match[str] | None = None
    for line in _FENCE.finditer(text):
        if opening is None:
            opening = line
        elif line["fence"].startswith(opening["fence"]) and not line["info"].strip():
            yield _block(text, opening, line)
            opening = None
    if opening is not None:
        yield _block(text, opening, None)


def _block(text: str, opening: re.Match[str], closing: re.Match[str] | None) -> Block:
    words = opening["info"].split(maxsplit=1)
    start = min(opening.end() + 1, len(text))
    end = len(text) if closing is None else closing.start()
    language = words[0].lower() if words else ""
    return Block(language, opening["indent"], opening.start(), start, end, closing is not None)


def code_block(*languages: Annotated[str, str.lower]) -> Convert:
    """The content of the first fenced code block, or of the first in one of `languages`.

    The indentation of the opening fence is removed from each line. Fails if there is no such block, or if the block is
    not closed: the end of its code may be missing.
    """
    for language in languages:
        if len(language.split()) != 1 or language != language.strip():
            raise ParameterError("languages", quoted(language), expected="one word, such as python")

    def convert(text: str) -> Iterator[str]:
        blocks = list(fenced_blocks(text))
        if not blocks:
            raise RejectedTextError("there is no code block, which begins with a line of ``` or ~~~")
        chosen = next((block for block in blocks if not languages or block.language in languages), None)
        if chosen is None:
            raise RejectedTextError(f"there is no code block in {' or '.join(languages)}, only {_named(text, blocks)}")
        if not chosen.closed:
            raise RejectedTextError(
                f"the code block that begins at {place(text, chosen.opened)} is not closed; was the text cut off?"
            )
        yield _content(text, chosen)

    return convert


def _content(text: str, block: Block) -> str:
    content = text[block.start : block.end].removesuffix("\n").removesuffix("\r")
    if not block.indent:
        return content
    return "\n".join(_outdented(line, len(block.indent)) for line in content.split("\n"))


def _outdented(line: str, columns: int) -> str:
    """The line without the fence's indentation."""
    return line[min(columns, len(line) - len(line.lstrip(" \t"))) :]


def _named(text: str, blocks: list[Block]) -> str:
    """The first few blocks, each with its language and place."""
    named = [
        f"{excerpt(block.language) or 'one without a language'} at {place(text, block.opened)}"
        for block in blocks[:_NAMED_BLOCKS]
    ]
    return ", ".join(named) + (" and others" if len(blocks) > _NAMED_BLOCKS else "")
