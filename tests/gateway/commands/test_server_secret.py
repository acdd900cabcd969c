"""The server's secret: where it comes from, and that it is the same at the next start."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from plait.gateway.admission.tenants import TenantIds
from plait.gateway.cli import main
from plait.gateway.commands import server_secret as module
from plait.gateway.commands.server_secret import SECRET_FILE, known_secret, server_secret
from plait.gateway.config.file import ConfigError
from plait.gateway.config.sections import Config, TenantConfig
from plait.gateway.config.server import ServerConfig

WITH_KEYS = Config(server=ServerConfig(api_keys=("one",)))
GIVEN = "0123456789abcdef" * 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration's."""
    return tmp_path / "config.toml"


def warnings(path: Path, config: Config = WITH_KEYS) -> list[str]:
    """What a start says that an operator has to see to."""
    with capture_logs() as logs:
        server_secret(config, path)
    return [log["event"] for log in logs if log["log_level"] == "warning"]


def names(path: Path) -> list[str]:
    """The files beside a configuration, and itself."""
    return [file.name for file in path.parent.iterdir()]


def test_the_first_start_makes_it_and_the_next_finds_it(path: Path) -> None:
    assert warnings(path) == []
    file = path.with_name(SECRET_FILE)
    assert file.stat().st_mode & 0o777 == 0o600
    first = server_secret(WITH_KEYS, path)
    assert first == file.read_bytes().strip() == server_secret(WITH_KEYS, path) == known_secret(WITH_KEYS, path)
    assert first is not None
    assert len(bytes.fromhex(first.decode())) == 32
    assert names(path) == [SECRET_FILE]
    assert warnings(path) == []
    before, after = TenantIds(first), TenantIds(server_secret(WITH_KEYS, path))
    assert before.of_key("one") == after.of_key("one")
    assert before.label(before.of_key("one")) == after.label(after.of_key("one"))


def test_two_installations_have_different_ones(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert server_secret(WITH_KEYS, tmp_path / "a" / "c") != server_secret(WITH_KEYS, tmp_path / "b" / "c")


def test_the_configuration_has_precedence(path: Path) -> None:
    config = Config(server=ServerConfig(api_keys=("one",), secret=GIVEN))
    assert server_secret(config, path) == known_secret(config, path) == GIVEN.encode()
    assert names(path) == []
    assert GIVEN not in repr(config)


@pytest.mark.parametrize("config", [Config(), Config(server=ServerConfig(secret=GIVEN))])
def test_an_open_gateway_has_one_for_its_workers_and_keeps_no_file(path: Path, config: Config) -> None:
    made, given = server_secret(config, path), config.server.secret
    assert len(made) >= 32
    assert made == given.encode() if given else made != server_secret(config, path)
    assert known_secret(config, path) is None
    assert names(path) == []


def test_named_tenants_need_one_too(path: Path) -> None:
    tenants = (TenantConfig(name="blue", api_keys=("one",)),)
    assert server_secret(Config(tenants=tenants), path) is not None


def test_gateways_that_start_at_one_time_have_the_same(path: Path) -> None:
    together = threading.Barrier(8)

    def start(_: int) -> bytes | None:
        together.wait()
        return server_secret(WITH_KEYS, path)

    with ThreadPoolExecutor(8) as gateways:
        secrets = set(gateways.map(start, range(8)))
    assert secrets == {path.with_name(SECRET_FILE).read_bytes().strip()}


def test_who_comes_second_takes_the_first_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[bytes | None] = []

    def made_meanwhile(size: int) -> str:
        monkeypatch.undo()
        others.append(server_secret(WITH_KEYS, path))
        return os.urandom(size).hex()

    monkeypatch.setattr(module, "token_hex", made_meanwhile)
    assert [server_secret(WITH_KEYS, path)] == others
    assert names(path) == [SECRET_FILE]


def test_without_a_place_it_lasts_as_long_as_the_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module, "NamedTemporaryFile", read_only)
    (warning,) = warnings(path)
    assert "server.secret" in warning
    assert server_secret(WITH_KEYS, path) != server_secret(WITH_KEYS, path)


def test_a_file_for_others_is_warned_of(path: Path) -> None:
    server_secret(WITH_KEYS, path)
    path.with_name(SECRET_FILE).chmod(0o644)
    (warning,) = warnings(path)
    assert "0600" in warning


@pytest.mark.parametrize("content", [b"", b"short\n", b"x" * 31, b"x" * 20 + b" " + b"x" * 20, b"\xff" * 40])
def test_a_file_that_holds_no_secret_is_an_error(path: Path, content: bytes) -> None:
    file = path.with_name(SECRET_FILE)
    file.write_bytes(content)
    for reads in (server_secret, known_secret):
        with pytest.raises(ConfigError, match=r"plait\.secret: expected a secret"):
            reads(WITH_KEYS, path)
    assert file.read_bytes() == content


def test_a_file_that_cannot_be_read_is_an_error(path: Path) -> None:
    path.with_name(SECRET_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"plait\.secret: cannot be read"):
        server_secret(WITH_KEYS, path)


def test_checking_a_configuration_makes_none(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path.write_text('[server]\napi_keys = ["one"]\n[[engines]]\nurl = "http://127.0.0.1:1"\n')
    assert main(["check-config", "--config", str(path)]) == 0
    assert names(path) == ["config.toml"]
    path.with_name(SECRET_FILE).write_text("short")
    assert main(["check-config", "--config", str(path)]) == 2
    assert "plait.secret: expected a secret" in capfd.readouterr().err
