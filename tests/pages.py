"""The pages for readers, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.source_tree import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*) ?(?P<needs>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n) {4}\S.*")


class Block(NamedTuple):
    """A block of code in a page."""

    page: Path
    line: int
    """The line of the page on which its text begins, from 1."""
    language: str
    """As it is written behind the fence, `""` without one."""
    needs: str
    """The rest of that line, which readers do not see: what the block needs that a reader of the page may lack."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("text")) + 1, found["language"], found["needs"], found["text"])
        for found in BLOCK.finditer(text)
    ]


def all_blocks() -> list[Block]:
    """Each block of each page."""
    return [block for page in PAGES for block in blocks_of(page)]


def blocks(*languages: str) -> list[tuple[Path, str]]:
    """Each block of some languages, with its page."""
    return [(block.page, block.text) for block in all_blocks() if block.language in languages]


def command_lines() -> list[str]:
    """Each line of the blocks for a shell; a line that goes on behind a backslash is one."""
    texts = [text for _, text in blocks("sh")]
    return [line.strip() for text in texts for line in text.replace("\\\n", " ").splitlines()]
