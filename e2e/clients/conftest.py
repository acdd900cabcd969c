"""The servers that clients are run against, and the matrix of what works: `make e2e-clients`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from e2e.clients.matrix import Matrix
from e2e.clients.program_run import KEY, LIMITED_CALLS_PER_S, LIMITED_KEY
from e2e.servers import Fleet, Launcher
from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER

_MATRIX: Final = pytest.StashKey[Matrix]()

TIME_SCALE: Final = 200
"""Answers take hardly any time here: it is the clients that are tested."""
HOLD_TIMEOUT_S: Final = 0.2
"""After that a get of a variable that nobody produces fails, so that no generated request waits for longer."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MATRIX] = Matrix()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    matrix = config.stash[_MATRIX]
    matrix.write()
    if matrix.rows or matrix.notes:
        terminalreporter.section("clients")
        for line in matrix.lines():
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def matrix(pytestconfig: pytest.Config) -> Matrix:
    """Takes what works."""
    return pytestconfig.stash[_MATRIX]


@pytest.fixture(scope="session")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Fleet]]:
    """Two gateways: one forwards Responses and Messages, one translates them to chats, all that its engines have."""
    with Launcher(tmp_path_factory.mktemp("clients-fleet")) as launch:
        limited = {"name": "limited", "api_keys": [LIMITED_KEY], "calls_per_s": LIMITED_CALLS_PER_S}
        fleets = {}
        for name, options in (("forwarding", ()), ("translating", ("--chat-only",))):
            engines = {
                f"{name}-{number}": launch.engine(f"{name}-{number}", time_scale=TIME_SCALE, options=options)
                for number in (1, 2)
            }
            gateway = launch.gateway(
                engines.values(),
                name,
                server={"api_keys": [KEY], "isolate_tenants": True},
                sessions={"hold_timeout_s": HOLD_TIMEOUT_S},
                tenants=[limited],
            )
            fleets[name] = Fleet(gateway, engines)
        for fleet in fleets.values():
            fleet.start()
        yield fleets


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded engine's tokenizer, in a folder that looks like a model's."""
    folder = tmp_path_factory.mktemp("tokenizer") / "demo"
    shutil.copytree(EMBEDDED_FOLDER, folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder
