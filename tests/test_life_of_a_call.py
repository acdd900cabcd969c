"""docs/life_of_a_call.md is about the code as it is: its diagrams are the tables', its objects are where it says."""

from __future__ import annotations

import ast
import re

from tests.source_tree import ROOT, tree_of
from tests.state_diagrams import BLOCK, DIAGRAMS, PAGE, redrawn

OBJECT = re.compile(r"^\| `(?P<name>\w+)` \(`(?P<file>[\w/.]+)`\)", re.MULTILINE)
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_diagrams_are_drawn_from_the_tables() -> None:
    assert {match["name"] for match in BLOCK.finditer(TEXT)} == DIAGRAMS.keys()
    assert redrawn(TEXT) == TEXT, "run python -m tests.state_diagrams"


def test_every_object_is_where_the_page_says() -> None:
    listed = [(match["name"], match["file"]) for match in OBJECT.finditer(TEXT)]
    assert len(listed) > 20
    for name, file in listed:
        classes = {node.name for node in tree_of(ROOT / file).body if isinstance(node, ast.ClassDef)}
        assert name in classes, f"{file} has no {name}"


def test_every_file_that_it_names_is_there() -> None:
    assert all((ROOT / name).is_file() for name in re.findall(r"`([\w/]+/[\w.]+\.py)`", TEXT))
