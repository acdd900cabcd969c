"""docs/clients.md: each program runs as it is written, with the key and the address of a gateway."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from e2e.clients.environment import NODE, NODE_MODULES, OPENAI_2, OPENAI_3
from e2e.clients.program_run import KEY, run_tool
from e2e.servers import Fleet
from tests.pages import Block, blocks_of
from tests.source_tree import ROOT

PROGRAMS = [
    block
    for block in blocks_of(ROOT / "docs" / "clients.md")
    if block.needs == "client" and block.language in {"js", "python"}
]
"""`make packages` runs those that need no client."""

pytestmark = pytest.mark.nightly


def has_imports(python: Path, program: str) -> bool:
    """Whether an environment has the packages that a program imports."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    imported = [node.names[0].name for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Import)]
    imported += [node.module or "" for node in ast.walk(ast.parse(program)) if isinstance(node, ast.ImportFrom)]
    return all((site / name.partition(".")[0]).is_dir() for name in imported)


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_program_of_the_page_runs(block: Block, fleets: dict[str, Fleet], tmp_path: Path) -> None:
    here = block.text.replace("http://127.0.0.1:8000", fleets["forwarding"].gateway.url)
    program = here.replace('"KEY"', f'"{KEY}"')
    if block.language == "js":
        assert NODE_MODULES.is_dir(), "its environment is not there: run `make e2e-clients`"
        run_tool(["node", "--input-type=module", "--eval", program], NODE)
        return
    pythons = [one.environment.python for one in (OPENAI_3, OPENAI_2)]
    assert all(python.exists() for python in pythons), "their environments are not there: run `make e2e-clients`"
    python = next(python for python in pythons if has_imports(python, program))
    run_tool([str(python), "-I", "-c", program], tmp_path)
