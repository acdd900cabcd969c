"""`plait check-config` without engines: e2e tests have them."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import plait.gateway.commands.check_config
from plait.backends.http.trust import SYSTEM_TRUST
from plait.gateway.cli import main
from tests.backends.http.certificates import Authority, needs_openssl, self_signed, trusting
from tests.backends.http.scripted_engine import full_backlog

ENGINE = '[[models]]\nname = "m"\ntokenizer = "embedded"\n[[engines]]\nname = "a"\nurl = "http://127.0.0.1:9"\n'


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
    assert main(["check-config", "--config", str(config), "--probe"]) == 2
    printed = capsys.readouterr()
    assert "a: engine a cannot be reached: 127.0.0.1:9 refused the connection\n" in printed.out
    assert "1 engine of 1 cannot be used as configured" in printed.err


def test_an_address_that_does_not_answer_is_named(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plait.gateway.commands.check_config, "configure_logging", lambda *_words: None)
    with full_backlog() as port:
        config.write_text(f"[upstream]\nconnect_timeout_s = 0.05\n{ENGINE.replace(':9', f':{port}')}")
        assert main(["check-config", "--config", str(config), "--probe"]) == 2
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
        config.write_text(ENGINE.replace("http://127.0.0.1:9", f"{scheme}://localhost:{port}"))
        assert main(["check-config", "--config", str(config), "--probe"]) == 2
    printed, logged = capsys.readouterr()
    (said,) = (line for line in printed.splitlines() if line.startswith("a: "))
    assert problem in said
    assert "1 engine of 1 cannot be used as configured" in logged
