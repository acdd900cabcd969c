"""The installed package beside others that have its folders' names: nobody gets into anybody's way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.demo import demo, refused
from e2e.installed import CLASHING, clashing_folder, copied_environment
from e2e.ports import free_ports
from e2e.server_process import eventually

PROGRAM = """
import sys
from plait.client import Client, SemanticVariable, semantic_function

@semantic_function(max_tokens=5)
def greet(name: str) -> SemanticVariable:
    '''Greet {{name}}: {{greeting}}'''

with Client(sys.argv[1], model="demo") as client, client.session() as session:
    print(greet.on(session)("Ada").get())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied_environment(Path(sys.executable), tmp_path_factory.mktemp("environment") / "copy")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return clashing_folder(tmp_path)


def test_it_is_the_wheel_that_runs(python: Path, folder: Path) -> None:
    program = f"import plait.gateway.app, {', '.join(CLASHING)}; print(plait.gateway.app.__file__, policy.__file__)"
    # Isolated, or the user's own policy.py would be the one that is found.
    shown = subprocess.run([str(python), "-P", "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    assert all(str(python.parents[1]) in path for path in shown.stdout.split())


def test_the_demo_and_the_client_run_beside_them(python: Path, folder: Path) -> None:
    first = free_ports(5)[0]
    with demo(first, first + 1, plait=python.with_name("plait"), folder=folder) as process:
        assert process.stdout is not None
        eventually(lambda: process.poll() is not None or not refused(first))
        assert process.poll() is None
        command = [str(python), "-c", PROGRAM, f"http://127.0.0.1:{first}/v1"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
        assert said.stdout.strip()
