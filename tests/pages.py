"""The pages for readers, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.source_tree import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S.*\n)+")


class Block(NamedTuple):
    """A block of code: its page, its language as it is written there, `""` without one, and its text."""

    page: Path
    language: str
    text: str


def all_blocks() -> list[Block]:
    """Each block of each page."""
    texts = ((page, page.read_text(encoding="utf-8")) for page in PAGES)
    return [Block(page, found["language"], found["text"]) for page, text in texts for found in BLOCK.finditer(text)]


def blocks(*languages: str) -> list[tuple[Path, str]]:
    """Each block of some languages, with its page."""
    return [(page, text) for page, language, text in all_blocks() if language in languages]


def command_lines() -> list[str]:
    """Each line of the blocks for a shell, indented ones included; a line that goes on behind a backslash is one."""
    texts = [text for _, text in blocks("", "sh")]
    texts += [text for page in PAGES for text in INDENTED.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))]
    return [line.strip() for text in texts for line in text.replace("\\\n", " ").splitlines()]
