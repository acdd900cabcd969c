"""The base in a new environment: a program that calls a gateway."""

from __future__ import annotations

import subprocess

import pytest

from e2e.release.environment import VERSION, CheckSize, NewEnvironment
from e2e.release.programs import GREET
from e2e.servers import Fleet

MOST_MB = 15


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> NewEnvironment:
    environment = NewEnvironment.create(tmp_path_factory.mktemp("environment") / "base")
    environment.install()
    return environment


def test_it_is_small(base: NewEnvironment, check_size: CheckSize) -> None:
    assert base.distributions().keys() >= {"httpx", "msgspec", "plait"}
    check_size("client", base, MOST_MB)


def test_a_program_runs_on_a_gateway_elsewhere(base: NewEnvironment, fleet: Fleet) -> None:
    said = base.run("-c", GREET, f"{fleet.gateway.url}/v1")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.strip()


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_command_of_the_gateway_says_what_to_install(base: NewEnvironment, command: str) -> None:
    said = subprocess.run([str(base.plait), command], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (2, "")
    (line,) = said.stderr.splitlines()
    assert line.endswith("pip install 'plait[gateway]'")


def test_the_command_says_its_version(base: NewEnvironment) -> None:
    said = subprocess.run([str(base.plait), "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"plait {VERSION}\n"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_adapter_says_which_engine_is_missing(base: NewEnvironment, engine: str) -> None:
    said = subprocess.run([str(base.plait), engine, "--", "model"], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert f"pip install 'plait[{engine}]'" in said.stderr
