"""The repository's Python files and what each imports, read from the source without importing anything."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

SHIPPED = ("policy", "backends", "gateway", "client", "lab")
"""The folders of the package `plait`."""

FOLDERS = {*SHIPPED, "tests", "examples", "e2e", "benchmarks"}


def sources(package: str) -> list[Path]:
    """A folder's Python files."""
    return sorted((ROOT / package).rglob("*.py"))


def path_of(file: Path) -> str:
    """A file's path in the repository."""
    return file.relative_to(ROOT).as_posix()


@cache
def tree_of(file: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(file: Path) -> set[str]:
    """The dotted names that a file imports anywhere in it, relative ones made absolute.

    Our own begin with their folder: `plait.policy.types` is `policy.types` here.
    """
    return {name.removeprefix("plait.") for name in imported_names(file)}


def imported_names(file: Path) -> set[str]:
    """The same as they are written."""
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = file.relative_to(ROOT).parent.parts
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def top_level(names: set[str]) -> set[str]:
    """What the names begin with."""
    return {name.partition(".")[0] for name in names}


def module_file(name: str) -> Path | None:
    """The file of one of our modules, from a dotted name that may go on to a name inside it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def reached_from(files: list[Path]) -> set[Path]:
    """The files and every one of our modules that importing them imports, packages on the way included."""
    reached: set[Path] = set()
    todo = list(files)
    while todo:
        file = todo.pop()
        if file in reached:
            continue
        reached.add(file)
        for name in imports(file):
            if name.partition(".")[0] in FOLDERS:
                package = [ROOT.joinpath(*name.split(".")[:depth], "__init__.py") for depth in (1, 2)]
                todo += [found for found in (module_file(name), *package) if found is not None and found.is_file()]
    return reached
