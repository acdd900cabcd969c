"""Code stays small enough to read: when something wants to grow past these, a name is missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.source_tree import SHIPPED, path_of, sources, tree_of

FILE_LINES, CLASS_LINES, FUNCTION_LINES = 500, 300, 40
"""Of shipped code."""

TEST_FILE_LINES = 400
"""Of each file in `TESTING`, which has no other limit."""

TESTING = ("tests", "e2e", "benchmarks")

EXCEPTIONS: dict[str, str] = {}
"""`file` or `file: name` -> why it is larger."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def file_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def lines(node: ast.ClassDef | Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def too_large(file: Path) -> Iterator[str]:
    if file_lines(file) > FILE_LINES:
        yield path_of(file)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ClassDef) and lines(node) > CLASS_LINES:
            yield f"{path_of(file)}: {node.name}"
        if isinstance(node, Function) and lines(node) > FUNCTION_LINES:
            yield f"{path_of(file)}: {node.name}"


def test_nothing_is_too_large_without_a_reason() -> None:
    found = {place for package in SHIPPED for file in sources(package) for place in too_large(file)}
    assert found == EXCEPTIONS.keys(), "a place without a reason, or a reason without its place"
    assert all(EXCEPTIONS.values())


def test_no_file_of_tests_is_too_large() -> None:
    files = [file for folder in TESTING for file in sources(folder) if "node_modules" not in file.parts]
    assert files
    assert [path_of(file) for file in files if file_lines(file) > TEST_FILE_LINES] == []
