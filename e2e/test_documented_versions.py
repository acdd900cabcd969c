"""The documented versions of engines are those that are tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

from e2e.real_schedulers import versions
from e2e.vllm import environment

ROOT: Final = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", versions.KINDS.values(), ids=versions.KINDS)
def test_the_table_of_versions_is_generated(kind: versions.Versions) -> None:
    page = (ROOT / "docs" / f"{kind.name}.md").read_text(encoding="utf-8")
    assert "\n".join(["", *kind.table(), ""]) in page, "paste what `table` yields"


@pytest.mark.parametrize(
    ("kind", "floor"),
    [
        (versions.VLLM, environment.OLDEST_VLLM.rpartition(".")[0]),
        (versions.SGLANG, versions.SGLANG.on_sources[0]),
    ],
    ids=versions.KINDS,
)
def test_the_oldest_version_is_the_floor(kind: versions.Versions, floor: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"][kind.name] == [f"{kind.name}>={floor}"]
    page = (ROOT / "docs" / f"{kind.name}.md").read_text(encoding="utf-8")
    assert re.search(rf"{kind.title} {re.escape(floor)} or newer", page)
