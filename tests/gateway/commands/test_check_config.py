"""`plait check-config` without engines: e2e tests have them."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import plait.gateway.commands.check_config
from plait.backends.http.client import HttpClient
from plait.backends.http.trust import SYSTEM_TRUST
from plait.gateway.cli import main
from plait.gateway.commands.check_config import LOOK_S, not_offered
from plait.gateway.config.sections import ModelConfig
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.health import HealthState
from tests.backends.http.certificates import Authority, needs_openssl, self_signed, trusting
from tests.backends.http.scripted_engine import full_backlog
from tests.waiting import WITHIN_S

ENGINE = '[[models]]\nname = "m"\ntokenizer = "embedded"\n[[engines]]\nname = "a"\nurl = "http://127.0.0.1:9"\n'
PATIENT = f"[upstream]\nconnect_timeout_s = {WITHIN_S}\nprobe_timeout_s = {WITHIN_S}\n"
PROBE = ("--probe", f"--probe-timeout-s={WITHIN_S}")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_a_configuration_that_can_be_used_is_said(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(ENGINE)
    assert main(["check-config", "--config", str(config)]) == 0
    assert capsys.readouterr().out


def test_a_wrong_key_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(ENGINE + "nonsense = 1\n")
    assert main(["check-config", "--config", str(config)]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_an_engine_that_does_not_answer_is_shown(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plait.gateway.commands.check_config, "configure_logging", lambda *_words: None)
    config.write_text(ENGINE)
    assert main(["check-config", "--config", str(config), *PROBE]) == 2
    printed = capsys.readouterr()
    assert "a: engine a cannot be reached: 127.0.0.1:9 refused the connection\n" in printed.out
    assert "1 engine of 1 cannot be used as configured" in printed.err


def test_an_address_that_does_not_answer_is_named(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plait.gateway.commands.check_config, "configure_logging", lambda *_words: None)
    with full_backlog() as port:
        config.write_text(f"[upstream]\nconnect_timeout_s = 0.05\n{ENGINE.replace(':9', f':{port}')}")
        assert main(["check-config", "--config", str(config), *PROBE]) == 2
    said = rf"a: two probes in a row were not answered in time: 127\.0\.0\.1:{port} did not answer within 0\.0\d+ s\n"
    assert re.search(said, capsys.readouterr().out)


@contextmanager
def server(tls: ssl.SSLContext | None) -> Iterator[int]:
    """The port of a server in a thread, which refuses all that it is sent as HTTP servers do."""
    loop, port, stop = asyncio.new_event_loop(), list[int](), asyncio.Event()
    loop.set_exception_handler(lambda *_: None)  # clients that refuse its certificate
    ready = threading.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0, ssl=tls) as listening:
            port.append(listening.sockets[0].getsockname()[1])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    yield port[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@needs_openssl
@pytest.mark.parametrize(
    ("scheme", "tls_of", "problem"),
    [
        ("https", lambda known: known.server(ends="20210101000000Z"), "has a certificate that has expired"),
        ("https", lambda known: known.server(begins="20980101000000Z"), "has a certificate that is not yet valid"),
        ("https", lambda known: self_signed(known.folder), "has a self-signed certificate that is not trusted"),
        (
            "https",
            lambda known: Authority(known.folder / "other", "O").server(),
            "has a certificate of an unknown issuer",
        ),
        ("https", lambda known: known.server("DNS:a.example"), "for another name: for a.example, not for localhost"),
        ("https", lambda _known: None, "answers without TLS"),
        ("http", lambda known: known.server(), "its port speaks TLS: its url should begin with https://"),
    ],
    ids=["expired", "not yet valid", "self-signed", "unknown issuer", "other name", "plain HTTP", "TLS"],
)
def test_what_is_wrong_with_tls_is_said(
    *,
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    tls_of: Callable[[Authority], ssl.SSLContext | None],
    problem: str,
) -> None:
    monkeypatch.setattr(plait.gateway.commands.check_config, "configure_logging", lambda *_words: None)
    known = Authority(config.parent / "known")
    trusting(known.certificate, monkeypatch)
    monkeypatch.setattr(SYSTEM_TRUST, "_context", None)
    with server(tls_of(known)) as port:
        config.write_text(PATIENT + ENGINE.replace("http://127.0.0.1:9", f"{scheme}://localhost:{port}"))
        assert main(["check-config", "--config", str(config), *PROBE]) == 2
    printed, logged = capsys.readouterr()
    (said,) = (line for line in printed.splitlines() if line.startswith("a: "))
    assert problem in said
    assert "1 engine of 1 cannot be used as configured" in logged


@needs_openssl
def test_a_hint_that_comes_after_several_looks_is_said(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another handshake gives it, when the engine is known to be down already."""
    monkeypatch.setattr(plait.gateway.commands.check_config, "configure_logging", lambda *_words: None)
    speaks_tls = HttpClient.speaks_tls

    async def late(client: HttpClient) -> bool:
        await asyncio.sleep(3 * LOOK_S)
        return await speaks_tls(client)

    monkeypatch.setattr(HttpClient, "speaks_tls", late)
    with server(Authority(config.parent / "known").server()) as port:
        config.write_text(PATIENT + ENGINE.replace(":9", f":{port}"))
        assert main(["check-config", "--config", str(config), *PROBE]) == 2
    assert "its port speaks TLS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"a": ["b"], "b": ["a"]}, 'models[0].fallbacks[0] = "b": a loop, as b falls back to a'),
        ({"a": ["b"], "b": ["c"], "c": ["a"]}, 'models[1].fallbacks[0] = "c": a loop, as c falls back to b'),
        ({"a": ["alias-of-b"], "b": []}, 'models[0].fallbacks[0] = "alias-of-b": an alias never answers for another'),
    ],
)
def test_a_fallback_that_cannot_help_is_named(
    models: dict[str, list[str]], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        f'[[models]]\nname = "{name}"\ntokenizer = "embedded"\nfallbacks = {fallbacks}\naliases = ["alias-of-{name}"]\n'
        for name, fallbacks in models.items()
    ]
    config.write_text("".join(rows) + '[[engines]]\nurl = "http://127.0.0.1:9"\n')
    assert main(["check-config", "--config", str(config)]) == 2
    assert said in capsys.readouterr().err


def test_models_that_fall_back_in_a_row_are_good(config: Path) -> None:
    names = {"a": ["b", "c"], "b": ["c"], "c": []}
    rows = [
        f'[[models]]\nname = "{name}"\ntokenizer = "embedded"\nfallbacks = {more}\n' for name, more in names.items()
    ]
    config.write_text("".join(rows) + '[[engines]]\nurl = "http://127.0.0.1:9"\n')
    assert main(["check-config", "--config", str(config)]) == 0


def seen(state: HealthState, *models: str) -> FleetEngine:
    engine = SimpleNamespace(
        health=SimpleNamespace(state=state), offer=SimpleNamespace(models=dict.fromkeys(models, 1))
    )
    return cast("FleetEngine", engine)


def test_a_name_that_no_engine_has_is_found() -> None:
    models = [ModelConfig(name="a", fallbacks=("b", "small")), ModelConfig(name="typo")]
    assert list(not_offered(models, [seen(HealthState.UP, "a", "b"), seen(HealthState.DOWN, "small")])) == [
        'models[0].fallbacks has "small", which no engine that answers has; they have a, b',
        'models[1].name has "typo", which no engine that answers has; they have a, b',
    ]
    assert not list(not_offered(models, [seen(HealthState.DOWN)])), "the engine is what is wrong"
    assert list(not_offered([], [])) == ["services: none of the names has an address, so there is no engine"]


def test_a_store_of_another_number_of_workers_is_found(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "s.db.0-of-2").touch()
    config.write_text(f'[store]\npath = "s.db"\n{ENGINE}')
    assert main(["check-config", "--config", str(config)]) == 2
    assert "another number of workers" in capsys.readouterr().err


def test_a_store_that_is_no_database_is_found(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "s.db").write_text("somebody's text")
    (tmp_path / "s.db").chmod(0o600)
    config.write_text(f'[store]\npath = "s.db"\n{ENGINE}')
    assert main(["check-config", "--config", str(config)]) == 2
    assert "s.db is no SQLite database" in capsys.readouterr().err
