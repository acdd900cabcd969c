"""The extras: each part of the package imports what its extra brings, and an extra brings what somebody imports."""

from __future__ import annotations

import sys

import pytest

from tests.extras import distributions_of, modules_of
from tests.source_tree import SHIPPED, imports, path_of, sources, top_level

ENGINES = {"sglang", "vllm"}
NEWER = {"_typeshed", "compression"}
"""What type checkers bring, and Python 3.14."""
OF_THE_GATEWAY = ("", "cli", "gateway", "huggingface", "mistral", "otel", "postgresql", "profile")
NEVER_IMPORTED = {"sentencepiece", "uvloop"}
"""What transformers and uvicorn use if it is there."""


def modules(*extras: str) -> set[str]:
    return {module for extra in extras for name in distributions_of(extra) for module in modules_of(name)}


def imported(package: str) -> dict[str, set[str]]:
    """What each file of a package imports of other distributions."""
    known = {*sys.stdlib_module_names, *SHIPPED, *ENGINES, *NEWER}
    found = {path_of(file): top_level(imports(file)) - known for file in sources(package)}
    return {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("package", "extras"),
    [("client", ("", "langchain")), *((package, OF_THE_GATEWAY) for package in ("backends", "gateway", "lab"))],
)
def test_nothing_is_imported_that_no_extra_brings(package: str, extras: tuple[str, ...]) -> None:
    brought = modules(*extras)
    assert not {path: missing for path, names in imported(package).items() if (missing := names - brought)}


def test_langchain_is_imported_in_its_folder_only() -> None:
    base = modules("")
    assert {path.rpartition("/")[0] for path, names in imported("client").items() if names - base} == {
        "client/langchain"
    }


def test_an_extra_brings_nothing_that_nobody_imports() -> None:
    used = {name for package in SHIPPED for names in imported(package).values() for name in names}
    for extra in (*OF_THE_GATEWAY, "langchain"):
        idle = {name for name in distributions_of(extra) if not modules_of(name) & used}
        assert idle <= NEVER_IMPORTED, extra


def test_the_base_is_what_engines_have() -> None:
    """vLLM and SGLang require both: whoever adds to the base changes engines' environments."""
    assert distributions_of("") == {"httpx", "msgspec"}
