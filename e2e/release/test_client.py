"""The base in a new environment: a program that calls a gateway. Then the commands of operators, with their extra."""

from __future__ import annotations

import os
import subprocess

import pytest

from e2e.release.environment import VERSION, CheckSize, NewEnvironment
from e2e.release.programs import GREET
from e2e.server_process import Server
from e2e.servers import Fleet, Launcher

MOST_MB = 15
MOST_MB_OF_OPERATORS = 35
KEY = "admin"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> NewEnvironment:
    environment = NewEnvironment.create(tmp_path_factory.mktemp("environment") / "base")
    environment.install()
    return environment


@pytest.fixture(scope="module")
def operators(base: NewEnvironment) -> NewEnvironment:
    """The same environment with the extra `cli`. Tests of the base alone stand before those that ask for it."""
    base.install("cli")
    return base


@pytest.fixture
def watched(launch: Launcher) -> Server:
    """A gateway with an admin key."""
    engine = launch.engine("engine-1")
    gateway = launch.gateway([engine], server={"admin_key": KEY})
    Fleet(gateway, {engine.name: engine}).start()
    return gateway


def refused(environment: NewEnvironment, *arguments: str) -> str:
    """The one line with which a command ends that cannot do what it is asked for."""
    said = subprocess.run([str(environment.plait), *arguments], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (2, "")
    (line,) = said.stderr.splitlines()
    return line


def test_it_is_small(base: NewEnvironment, check_size: CheckSize) -> None:
    assert base.distributions().keys() >= {"httpx", "msgspec", "plait"}
    check_size("client", base, MOST_MB)


def test_a_program_runs_on_a_gateway_elsewhere(base: NewEnvironment, fleet: Fleet) -> None:
    said = base.run("-c", GREET, f"{fleet.gateway.url}/v1")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.strip()


@pytest.mark.parametrize(("command", "extra"), [("serve", "gateway"), ("demo", "gateway"), ("status", "cli")])
def test_a_command_says_what_to_install(base: NewEnvironment, command: str, extra: str) -> None:
    assert refused(base, command).endswith(f"pip install 'plait[{extra}]'")


def test_the_command_says_its_version(base: NewEnvironment) -> None:
    said = subprocess.run([str(base.plait), "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"plait {VERSION}\n"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_adapter_says_which_engine_is_missing(base: NewEnvironment, engine: str) -> None:
    said = subprocess.run([str(base.plait), engine, "--", "model"], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert f"pip install 'plait[{engine}]'" in said.stderr


def test_an_operator_needs_little_more(operators: NewEnvironment, check_size: CheckSize) -> None:
    assert operators.distributions().keys() >= {"rich", "shtab"}
    assert not operators.distributions().keys() & {"prometheus-client", "starlette", "structlog", "uvicorn"}
    check_size("commands of operators", operators, MOST_MB_OF_OPERATORS)


def test_an_operator_watches_a_gateway_elsewhere(operators: NewEnvironment, watched: Server) -> None:
    commands = [
        ["status", watched.url],
        ["explain", "waiting"],
        ["drain", "engine-1", "--url", watched.url],
        ["drain", "engine-1", "--url", watched.url, "--undo"],
        ["--help"],
        ["completion", "bash"],
    ]
    for words in commands:
        command, environment = [str(operators.plait), *words], {**os.environ, "PLAIT_ADMIN_KEY": KEY}
        said = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert (said.returncode, said.stderr) == (0, ""), words
        assert said.stdout


@pytest.mark.parametrize("words", [["status", "http://127.0.0.1:9"], ["drain", "a", "--url", "http://127.0.0.1:9"]])
def test_an_operator_is_told_that_nobody_answers(operators: NewEnvironment, words: list[str]) -> None:
    assert "does not answer as a gateway does" in refused(operators, *words, "--key", KEY)


def test_the_gateway_needs_more_than_an_operator(operators: NewEnvironment) -> None:
    assert refused(operators, "serve").endswith("pip install 'plait[gateway]'")
