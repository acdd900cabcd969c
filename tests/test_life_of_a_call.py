"""docs/life_of_a_call.md: its objects are where it says. The diagrams of the docs are those of the tables."""

from __future__ import annotations

import ast
import re

from tests.source_tree import ROOT, tree_of
from tests.state_diagrams import BLOCK, DIAGRAMS, DOCS, PAGES, redrawn

OBJECT = re.compile(r"^\| `(?P<name>\w+)` \(`(?P<file>[\w/.]+)`\)", re.MULTILINE)
TEXT = (DOCS / "life_of_a_call.md").read_text(encoding="utf-8")


def test_the_diagrams_are_drawn_from_the_tables() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sorted(match["name"] for text in texts for match in BLOCK.finditer(text)) == sorted(DIAGRAMS)
    assert [redrawn(text) for text in texts] == texts, "run python -m tests.state_diagrams"


def test_every_object_is_where_the_page_says() -> None:
    listed = [(match["name"], match["file"]) for match in OBJECT.finditer(TEXT)]
    assert len(listed) > 10
    for name, file in listed:
        classes = {node.name for node in tree_of(ROOT / file).body if isinstance(node, ast.ClassDef)}
        assert name in classes, f"{file} has no {name}"


def test_every_file_that_it_names_is_there() -> None:
    assert all((ROOT / name).is_file() for name in re.findall(r"`([\w/]+/[\w.]+\.py)`", TEXT))
