"""An engine behind TLS, whose certificate is not one of the system's."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from e2e.delaying_proxy import DelayingProxy
from e2e.servers import Launcher, eventually

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello over TLS"}], "max_tokens": 3}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_calls_probes_and_reports_trust_the_same_certificates(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, certificate = _own_certificate(tmp_path)
    engine = launch.engine("e")
    engine.start()
    engine.wait_until_ready()
    with DelayingProxy(engine.port, 0.0, tls=tls) as proxy:
        entries = [{"name": "e", "url": proxy.url}]
        stranger = launch.gateway(entries, "stranger")
        stranger.start()
        eventually(lambda: "certificate verify failed" in stranger.log())
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        gateway = launch.gateway(entries)
        gateway.start()
        gateway.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_knowledge", knowledge="exact") == 1)
        answer = gateway.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["plait-engine"]) == (200, "e")
        gateway.stop()
        stranger.stop()


def _own_certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's key and certificate, and the file of the latter."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = ["openssl", "req", "-x509", *curve, *names, "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    return tls, certificate
