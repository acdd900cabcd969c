"""Code stays small enough to read: when something wants to grow past these, a name is missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.source_tree import SHIPPED, path_of, sources, tree_of

FILE_LINES, CLASS_LINES, CLASS_METHODS, FUNCTION_LINES = 300, 200, 15, 40
"""Of shipped code."""

TEST_FILE_LINES = 400
"""Of each file in `TESTING`, which has no other limit."""

TESTING = ("tests", "e2e", "benchmarks")

EXCEPTIONS = {
    "backends/http/connection.py: Connection": (
        "an asyncio protocol with its parser's callbacks, which have to be methods of one object"
    ),
}
"""`file` or `file: name` -> why it is larger."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def file_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def lines(node: ast.ClassDef | Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def methods(node: ast.ClassDef) -> int:
    """Those with a name of their own, properties and private ones included; dunder methods are the language's."""
    return sum(isinstance(part, Function) and not part.name.startswith("__") for part in node.body)


def too_large(file: Path) -> Iterator[str]:
    if file_lines(file) > FILE_LINES:
        yield path_of(file)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ClassDef) and (lines(node) > CLASS_LINES or methods(node) > CLASS_METHODS):
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


def test_methods_are_counted_without_those_of_the_language() -> None:
    source = "class A:\n    def __init__(self): ...\n    def a(self): ...\n    @property\n    def b(self): ..."
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    assert (methods(node), lines(node)) == (2, 5)
