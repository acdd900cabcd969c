"""Who writes what of a call that waits."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from plait.gateway.admission.backlog import Waiting
from tests.source_tree import path_of, sources

WRITERS = {
    "call": {"gateway/admission/admission.py"},
    "is_leased": {"gateway/calls/gate.py"},
    "tell": {"gateway/calls/gate.py"},
    "number": {"gateway/admission/admission.py"},
    "is_back": {"gateway/admission/admission.py"},
    "rank": {"policy/admission/line.py"},
    "precedence": {"gateway/admission/lines.py", "policy/admission/line.py"},
    "work_s": {"gateway/admission/queue.py"},
    "prefill_s": {"gateway/admission/queue.py"},
    "before": {"gateway/admission/backlog.py"},
    "before_s": {"gateway/admission/backlog.py"},
    "turn": {"gateway/admission/admission.py"},
    "line_changes": {"gateway/admission/lines.py"},
    "booking": {"gateway/admission/lines.py"},
    "released": {"gateway/admission/lines.py"},
    "is_sent": {"gateway/admission/lines.py"},
    "error": {"gateway/admission/queue.py"},
}
"""The modules that assign to a field; a line reorders what it holds as it changes a class."""


def assigned(file: Path) -> Iterator[str]:
    """The attributes of calls that wait, or of tickets, that a module assigns to."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if not isinstance(one, ast.Attribute):
                    continue
                owner = one.value.id if isinstance(one.value, ast.Name) else getattr(one.value, "attr", "")
                if owner in {"call", "waiting", "ticket"}:
                    yield one.attr


def test_each_field_has_its_writer() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    files = [file for package in ("gateway", "policy") for file in sources(package)]
    for file in files:
        if Path(path_of(file)).parent.name in {"admission", "calls"}:
            for name in assigned(file):
                found[name].add(path_of(file))
    fields = {field.name for field in msgspec.structs.fields(Waiting)}
    assert {name: places for name, places in found.items() if name in fields} == WRITERS
