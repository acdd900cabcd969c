"""The base in the environment of a real vLLM: Plait is all that it adds, and the adapter finds what it needs."""

from __future__ import annotations

import subprocess
from importlib.metadata import distributions
from pathlib import Path

import pytest

from e2e.installed import CLASHING, copied_environment
from e2e.vllm.environment import ENVIRONMENT

CHECK = """
from plait.backends.vllm import middleware, scheduler
from plait.backends.vllm.compatibility import REQUIRED

REQUIRED.installed_tier("chunks")
print(scheduler.__file__)
"""

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a copy of vLLM's environment, in which pip has installed the wheel, without an index to get more from."""
    assert ENVIRONMENT.python.exists(), "run `make release`, which builds vLLM's environment"
    return copied_environment(ENVIRONMENT.python, tmp_path_factory.mktemp("environment") / "vllm")


def test_it_adds_plait_and_nothing_else(python: Path) -> None:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    assert {one.name for one in distributions(path=[str(site)])} == {"plait", *CLASHING}


def test_the_adapter_finds_what_it_needs_of_vllm(python: Path) -> None:
    said = subprocess.run([str(python), "-I", "-c", CHECK], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert str(python.parents[1]) in said.stdout


def test_the_command_takes_vllms_arguments(python: Path) -> None:
    plait = python.with_name("plait")
    said = subprocess.run([str(plait), "vllm", "--help"], capture_output=True, text=True, check=True)
    assert "--scheduler" in said.stdout
