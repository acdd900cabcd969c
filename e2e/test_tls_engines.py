"""Engines behind TLS, whose certificates are not of the system's issuers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pytest

from e2e.delaying_proxy import DelayingProxy
from e2e.rolling_load import steady_load
from e2e.server_process import PLAIT, eventually
from e2e.servers import Launcher
from tests.waiting import WITHIN_S

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello over TLS"}], "max_tokens": 3}

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


@contextmanager
def engines_behind(tls: ssl.SSLContext, launch: Launcher, *names: str) -> Iterator[dict[str, DelayingProxy]]:
    """Engines that are reached by TLS alone."""
    engines = [launch.engine(name) for name in names]
    for engine in engines:
        engine.start()
    with ExitStack() as proxies:
        for engine in engines:
            engine.wait_until_ready()
        yield {engine.name: proxies.enter_context(DelayingProxy(engine.port, 0.0, tls=tls)) for engine in engines}


def test_calls_probes_and_reports_trust_the_same_certificates(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, certificate = _own_certificate(tmp_path)
    with engines_behind(tls, launch, "e") as proxies:
        entries = [{"name": "e", "url": proxies["e"].url}]
        stranger = launch.gateway(entries, "stranger")
        stranger.start()
        eventually(lambda: "has a self-signed certificate that is not trusted" in stranger.log())
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        gateway = launch.gateway(entries)
        gateway.start()
        gateway.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_knowledge", knowledge="exact") == 1)
        answer = gateway.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["plait-engine"]) == (200, "e")
        gateway.stop()
        stranger.stop()


@pytest.mark.parametrize("is_told", [True, False], ids=["SIGHUP", "no signal"])
async def test_no_call_is_lost_while_the_issuer_changes(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """A gateway that is not told finds out by the first certificate that it refuses."""
    (tls, old), (new_tls, new), trusted = _own_certificate(tmp_path), _own_certificate(tmp_path), tmp_path / "trusted"
    trusted.write_bytes(old.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    with engines_behind(tls, launch, "a", "b") as proxies:
        gateway = launch.gateway([{"name": name, "url": proxy.url} for name, proxy in proxies.items()])
        gateway.start()
        gateway.wait_until_ready()
        async with steady_load(gateway, workers=3) as before:
            trusted.write_bytes(old.read_bytes() + new.read_bytes())
            if is_told:
                gateway.signal(signal.SIGHUP)
                await asyncio.to_thread(eventually, lambda: "certificates reloaded" in gateway.log())
            _change(tls, new_tls)
            known = {name: proxy.connections for name, proxy in proxies.items()}
            async with steady_load(gateway, workers=12) as after:
                await asyncio.to_thread(
                    eventually, lambda: all(proxy.connections > known[name] for name, proxy in proxies.items())
                )
                await asyncio.sleep(0.5)
        assert before.lost() == after.lost() == {}, (before.ended, after.ended)
        assert "engine failed a call" not in gateway.log()
        gateway.stop()


def test_a_file_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    missing, url = tmp_path / "missing.pem", "https://localhost:1"
    environment = {**os.environ, "SSL_CERT_FILE": str(missing)}
    for words in (["serve", url], ["check-config", url]):
        ended = subprocess.run(
            [PLAIT, *words], check=False, capture_output=True, text=True, env=environment, timeout=WITHIN_S
        )
        problem = f"plait: SSL_CERT_FILE={missing} cannot be read: No such file or directory\n"
        assert (ended.returncode, ended.stderr) == (2, problem)


def _own_certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's key and certificate, which it has issued itself, and the file of the latter."""
    place = Path(mkdtemp(dir=folder))
    key, certificate = place / "key.pem", place / "certificate.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = ["openssl", "req", "-x509", *curve, *names, "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    return tls, certificate


def _change(tls: ssl.SSLContext, other: ssl.SSLContext) -> None:
    """From now on a server with `tls` has the other's certificate, at once for all handshakes."""

    def choose(handshake: ssl.SSLObject, _name: str, _tls: ssl.SSLContext) -> None:
        handshake.context = other

    tls.sni_callback = choose
