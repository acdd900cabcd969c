"""A state has one owner: each field of a session, and of a call in it, is written by one module.

An object is known by the name that it has at the place of writing: `session`, `self._session`, `session.calls[name]`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.source_tree import ROOT, path_of, sources, tree_of

OWNED = {"Session": ("session.py", "session"), "HeldCall": ("held_call.py", "call")}
"""Classes of `gateway/programs`, each with its file and the name that its objects have in other modules."""

FOLDER = ROOT / "gateway" / "programs"
WRITING = ("gateway/programs", "gateway/chaining", "gateway/api")
"""The rooms that have sessions and their calls."""

MUTATORS = frozenset(
    ("append", "add", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "remove", "setdefault")
) | {"update"}
OBJECTS = {"graph", "text"}
"""Fields that are objects with a method named like one of these."""


def fields(name: str) -> set[str]:
    """The fields that a class declares, or sets in its `__init__`."""
    file, _ = OWNED[name]
    (cls,) = [node for node in tree_of(FOLDER / file).body if isinstance(node, ast.ClassDef) and node.name == name]
    declared = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return declared | {field for owner, field in writes(cls) if owner == "self"}


def nodes(tree: ast.AST, *, is_running: bool = False) -> Iterator[ast.AST]:
    """All nodes; without those of constructors if the object `is_running`."""
    for node in ast.iter_child_nodes(tree):
        if not (is_running and isinstance(node, ast.FunctionDef) and node.name == "__init__"):
            yield node
            yield from nodes(node, is_running=is_running)


def writes(tree: ast.AST, *, is_running: bool = False) -> Iterator[tuple[str, str]]:
    """The name of an object and its field, wherever a field is set, deleted or changed in place."""
    for node in nodes(tree, is_running=is_running):
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            targets = [node.func.value]
        else:
            continue
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                place = part
                while isinstance(place, ast.Subscript):
                    place = place.value
                if isinstance(place, ast.Attribute) and (owner := shown_name(place.value)):
                    yield owner, place.attr


def shown_name(place: ast.expr) -> str:
    """An object's name: of its variable, of its field, or of the collection that it is in, in the singular."""
    if isinstance(place, ast.Name):
        return place.id
    if isinstance(place, ast.Attribute):
        return place.attr.lstrip("_")
    return shown_name(place.value).removesuffix("s") if isinstance(place, ast.Subscript) else ""


def writers(name: str) -> dict[str, set[str]]:
    """The modules that write each field, the constructor aside."""
    own_file, shown_as = OWNED[name]
    found: dict[str, set[str]] = {}
    for file in [file for room in WRITING for file in sources(room)]:
        names = {"self", shown_as} if file.name == own_file else {shown_as}
        for owner, field in writes(tree_of(file), is_running=True):
            if owner in names and field in fields(name):
                found.setdefault(field, set()).add(path_of(file))
    return found


@pytest.mark.parametrize("name", OWNED)
def test_a_field_has_one_writer(name: str) -> None:
    found = writers(name)
    assert found, "the names are those of the code"
    assert not {field: files for field, files in found.items() if len(files) > 1 and field not in OBJECTS}


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("session.objective = x", ("session", "objective")),
        ("self._session.closed = True", ("session", "closed")),
        ("session.calls[name].attempts += 1", ("call", "attempts")),
        ("del self.call.promise", ("call", "promise")),
        ("session.values.pop(name)", ("session", "values")),
        ("session.getters[name].append(getter)", ("session", "getters")),
        ("a, owner.call.owner = b", ("call", "owner")),
    ],
)
def test_a_write_is_found_wherever_the_object_is(source: str, written: tuple[str, str]) -> None:
    assert written in set(writes(ast.parse(source)))
