"""A port in use is said in one line, by every command that listens."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.gateway.cli import main
from plait.gateway.server.listening import bound_sockets
from tests.waiting import WITHIN_S

CONFIG = Path(__file__).parents[3] / "config.example.toml"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture
def free() -> int:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port: int = other.getsockname()[1]
        return port


def test_a_free_port_is_bound() -> None:
    (bound,) = bound_sockets("127.0.0.1", 0)
    with bound:
        assert bound.getsockname()[1] > 0


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_an_address_of_another_machine_cannot_be_bound(host: str) -> None:
    with pytest.raises(ValueError, match=f"cannot listen on {host}"):
        bound_sockets(host, 0)


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--config", str(CONFIG), "--port"],
        ["engine", "--port"],
        ["demo", "--port"],
        ["demo", "--port", "FREE", "--engine-port"],
    ],
    ids=" ".join,
)
def test_a_port_in_use_is_one_line(command: list[str], taken: int, free: int) -> None:
    """In a process of its own: the commands set up logging and signals. The default ports may be in use too."""
    command = [str(free) if word == "FREE" else word for word in command]
    plait = [sys.executable, "-m", "plait.gateway.cli", *command, str(taken)]
    run = subprocess.run(plait, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert str(taken) in run.stderr


def test_a_configuration_can_be_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--config", str(CONFIG)]) == 0
    assert "good, with 4 engines and 1 configured model" in capfd.readouterr().out
    bad = tmp_path / "bad.toml"
    bad.write_text('[[models]]\nname = "m"\ntokenizer = "nowhere"\n[[engines]]\nurl = "http://127.0.0.1:1"\n')
    assert main(["check-config", "--config", str(bad)]) == 2
    assert "nowhere" in capfd.readouterr().err
