"""The table of error codes: it has each code that the sources use, with its status, and the page is the table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.backends import errors
from plait.backends.error_codes import CODES, GROUPS
from plait.backends.protocol.json_bounds import Excess
from plait.gateway.commands.explain import lines
from tests import errors_page
from tests.source_tree import sources

COMPOSED = {"calls_per_second", "tokens_per_second", *Excess}
"""Codes that no literal in the sources has."""
PASSED = {
    *("too_many_sessions", "too_many_variables", "too_many_waiting_calls"),
    *("input_failed", "variable_failed", "skipped"),
}
"""Codes that a helper in `gateway/guests/programs/core` is given."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("gateway", "backends", "policy"):
        for file in sources(package):
            yield file, ast.parse(file.read_text(encoding="utf-8"))


def text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def given_codes() -> set[str]:
    """Each `code="..."` of a call, and of a class of errors."""
    return {
        found
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call | ast.ClassDef)
        for keyword in node.keywords
        if keyword.arg == "code"
        for found in [text(keyword.value)]
        if found is not None
    }


def all_errors(kind: type[errors.PlaitError] = errors.PlaitError) -> Iterator[type[errors.PlaitError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from all_errors(subclass)


def test_every_code_of_the_sources_is_in_the_table_and_no_other() -> None:
    assert {*given_codes(), *COMPOSED, *PASSED} == set(CODES)


def test_a_code_comes_with_the_status_of_its_class() -> None:
    wrong = [
        (kind.__name__, kind.status)
        for kind in all_errors()
        if kind.default_code is not None and kind.__module__.startswith("plait.")
        if CODES[kind.default_code].status != kind.status
    ]
    assert not wrong


def test_a_code_is_there_once() -> None:
    assert len(CODES) == sum(map(len, GROUPS.values()))


def test_the_page_is_the_table() -> None:
    written = errors_page.PAGE.read_text(encoding="utf-8")
    assert written == errors_page.text(), "python -m tests.errors_page writes it"


def test_a_code_is_explained() -> None:
    assert "\n".join(lines("waiting")).startswith("waiting: HTTP 429\n  The call waited for an engine")
    with pytest.raises(ValueError, match="context_length_exceeded"):
        lines("context_length_exceded")
