"""Code stays small enough to read: when something wants to grow past these generous sizes, a name is missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.source_tree import SHIPPED, path_of, sources, tree_of

FILE_LINES, CLASS_LINES, FUNCTION_LINES = 600, 400, 60


def too_large(file: Path) -> Iterator[str]:
    if len(file.read_text(encoding="utf-8").splitlines()) > FILE_LINES:
        yield path_of(file)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            most = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            if node.end_lineno - node.lineno >= most:
                yield f"{path_of(file)}: {node.name}"


def test_nothing_is_too_large() -> None:
    assert [place for package in SHIPPED for file in sources(package) for place in too_large(file)] == []
