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


def test_the_oldest_version_is_the_floor() -> None:
    floor = environment.OLDEST_VLLM.rpartition(".")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={floor}"]
    assert re.search(rf"vLLM {re.escape(floor)} or newer", (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8"))
