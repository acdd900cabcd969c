"""What the extras of `pyproject.toml` bring, by the names of distributions and of their imports."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source_tree import ROOT


@cache
def _project() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


@cache
def _installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions_of(extra: str) -> set[str]:
    """The distributions that an extra names, with those of the extras in it; `""` is the base."""
    found: set[str] = set()
    for line in _project()[extra]:
        requirement = Requirement(line)
        if requirement.name == "plait":
            found |= {name for inner in requirement.extras for name in distributions_of(inner)}
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def modules_of(distribution: str) -> set[str]:
    """The top-level modules of an installed distribution."""
    return {
        module
        for module, owners in _installed().items()
        if distribution in {canonicalize_name(owner) for owner in owners}
    }
