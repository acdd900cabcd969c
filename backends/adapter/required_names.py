"""Checks whether the installed version of an engine has the names that a plugin relies on.

It checks no version numbers, but every class, method, parameter and attribute that the plugin uses or replaces.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class UnsupportedEngineError(RuntimeError):
    """The plugin cannot work with the installed engine, or with the way it was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredNames:
    """What a plugin relies on in an engine, which is installed as `package`.

    `methods` are dotted names, and the first parameters that a function must take, in this order. `attributes` are
    those that a scheduler must have once it is built. Of each entry of `either_method` and `either_attribute`, one name
    is enough: versions differ in which they have. `without_plait` says how to start the engine without the plugin.
    """

    engine: str
    package: str
    without_plait: str
    methods: Mapping[str, tuple[str, ...]]
    attributes: Sequence[str]
    either_method: Sequence[Mapping[str, tuple[str, ...]]] = ()
    either_attribute: Sequence[Sequence[str]] = ()

    def check_installed(self) -> None:
        """Raise UnsupportedEngineError if the installed version lacks one of the methods."""
        either = [(names, list(missing_names(names))) for names in self.either_method]
        self._refuse([*missing_names(self.methods), *_missing_alternatives(either)])

    def check_scheduler(self, scheduler: Any) -> None:
        """Raise UnsupportedEngineError if a scheduler lacks one of the attributes."""
        either = [(paths, list(missing_attributes(scheduler, paths))) for paths in self.either_attribute]
        self._refuse([*missing_attributes(scheduler, self.attributes), *_missing_alternatives(either)])

    def _refuse(self, names: Sequence[str]) -> None:
        if names:
            version = getattr(importlib.import_module(self.package), "__version__", "of unknown version")
            raise UnsupportedEngineError(
                f"Plait does not support this {self.engine} ({version}); it lacks: {', '.join(names)}. "
                f"{self.without_plait}, or install a version that Plait supports."
            )


def load(name: str) -> Any:
    """The object with a dotted name (a module's path, then attributes); None if it is missing."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found
    return None


def missing_names(methods: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The dotted names that are missing, and `name(parameters)` for functions that do not take these parameters."""
    for name, parameters in methods.items():
        found = load(name)
        if found is None:
            yield name
        elif parameters:
            taken = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
            if tuple(taken[: len(parameters)]) != parameters:
                yield f"{name}({', '.join(parameters)})"


def missing_attributes(target: Any, paths: Sequence[str]) -> Iterator[str]:
    """The dotted paths that an object lacks, each with its class's name in front."""
    for path in paths:
        if not _has(target, path):
            yield f"{type(target).__name__}.{path}"


def _missing_alternatives(either: Iterable[tuple[Collection[str], Sequence[str]]]) -> Iterator[str]:
    """`one or other` for each collection of names all of which are missing; `either` has what is missing of each."""
    for names, missing in either:
        if len(missing) == len(names):
            yield " or ".join(missing)


def _has(target: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(target, part):
            return False
        target = getattr(target, part)
    return True
