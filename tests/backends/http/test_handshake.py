"""What is said of an engine whose TLS handshake fails."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import uvloop

from plait.backends.errors import EngineUnreachableError
from plait.backends.http.client import HttpClient
from plait.backends.http.trust import Trust
from tests.backends.http.certificates import Authority, needs_openssl, self_signed, trusting
from tests.backends.http.scripted_engine import OK, Peer, Script, always, ask, on_both_loops, serving

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authorities") / "known")


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authorities") / "unknown", "Somebody")


@pytest.fixture
def trust(known: Authority, monkeypatch: pytest.MonkeyPatch) -> Trust:
    return trusting(known.certificate, monkeypatch)


def said(script: Script, server_tls: ssl.SSLContext | None, trust: Trust, host: str = "localhost") -> str:
    """What the cause of the error says of the engine at its address, the same on both loops."""
    found = set()

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the server's side of the handshake
        async with serving(script, server_tls=server_tls) as (engine, _):
            with pytest.raises(EngineUnreachableError, match=r"engine e cannot be reached$") as caught:
                await ask(HttpClient(f"https://{host}:{engine.port}", name="e", trust=trust))
            found.add(str(caught.value.__cause__).removeprefix(f"127.0.0.1:{engine.port} "))

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        on_both_loops(scenario)(new_loop)
    (only,) = found
    return only


def test_a_certificate_that_is_not_valid_now(known: Authority, trust: Trust) -> None:
    assert said(always, known.server(ends="20210101000000Z"), trust) == "has a certificate that has expired"
    early = said(always, known.server(begins="20980101000000Z"), trust)
    assert early == "has a certificate that is not yet valid: compare the clocks"


def test_a_certificate_that_nobody_known_has_issued(
    known: Authority, unknown: Authority, trust: Trust, tmp_path: Path
) -> None:
    source = f"trusted are those of SSL_CERT_FILE={known.certificate}"
    assert said(always, unknown.server(), trust) == f"has a certificate of an unknown issuer: {source}"
    own = said(always, self_signed(tmp_path), trust)
    assert own == f"has a self-signed certificate that is not trusted: {source}"


def test_an_issuer_that_has_another_key(trust: Trust, tmp_path: Path) -> None:
    """It has kept its name."""
    renewed = Authority(tmp_path / "renewed")
    assert "has a certificate of an unknown issuer" in said(always, renewed.server(), trust)


def test_new_certificates_that_could_not_be_read(
    known: Authority, unknown: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trusted.pem"
    file.write_bytes(known.certificate.read_bytes())
    trust = trusting(file, monkeypatch)
    trust.load()
    file.write_text("half a certif")
    problem = said(always, unknown.server(), trust)
    assert problem.endswith(f"; new ones were not taken over: SSL_CERT_FILE={file} has no certificates in PEM form")


@pytest.mark.parametrize(
    ("names", "host", "shown"),
    [
        ("DNS:a.example,DNS:b.example", "localhost", "a.example, b.example"),
        ("DNS:localhost", "127.0.0.1", "localhost"),
        ("IP:10.0.0.1", "127.0.0.1", "10.0.0.1"),
    ],
)
def test_a_certificate_for_another_name(known: Authority, trust: Trust, names: str, host: str, shown: str) -> None:
    problem = said(always, known.server(names), trust, host)
    assert problem == f"has a certificate for another name: for {shown}, not for {host}"


async def refuses(peer: Peer) -> None:
    """As HTTP servers answer what is not HTTP."""
    await peer.reader.read(1)
    peer.send(OK)


async def hangs_up(peer: Peer) -> None:
    await peer.reader.read(1)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (refuses, "answers without TLS, as a plain HTTP server does: its url should begin with http://"),
        (hangs_up, "closed the connection in the TLS handshake"),
    ],
)
def test_an_engine_without_tls(trust: Trust, script: Script, problem: str) -> None:
    assert said(script, None, trust).startswith(problem)


def test_an_engine_is_asked_whether_it_speaks_tls(tmp_path: Path) -> None:
    tls = self_signed(tmp_path)

    async def scenario() -> None:
        for server_tls, script in ((tls, always), (None, refuses), (None, hangs_up)):
            async with serving(script, server_tls=server_tls) as (engine, _):
                assert await HttpClient(engine.url).speaks_tls() is (server_tls is not None)
        assert not await HttpClient(engine.url).speaks_tls(), "nobody listens"

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        on_both_loops(scenario)(new_loop)
