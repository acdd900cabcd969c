"""Which certificates engines behind TLS are checked against, and when they are read again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from plait.backends.errors import EngineUnreachableError
from plait.backends.http.client import HttpClient
from plait.backends.http.trust import DIRECTORIES, FILE, Trust, TrustError
from tests.backends.http.certificates import Authority, needs_openssl, trusting
from tests.backends.http.scripted_engine import always, ask, serving

pytestmark = needs_openssl


class TrustedFile:
    """The file that the environment names."""

    def __init__(self, path: Path, authority: Authority) -> None:
        self.path = path
        self.has(authority)

    def has(self, authority: Authority) -> None:
        """The issuer's certificate is in it from now on."""
        self.write(authority.certificate.read_bytes())

    def write(self, content: bytes) -> None:
        self.path.write_bytes(content)


@pytest.fixture
def first(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "first")


@pytest.fixture
def second(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "second")


@pytest.fixture
def file(tmp_path: Path, first: Authority, monkeypatch: pytest.MonkeyPatch) -> TrustedFile:
    trusting(tmp_path / "trusted.pem", monkeypatch)
    return TrustedFile(tmp_path / "trusted.pem", first)


def test_nothing_is_read_before_it_is_needed(file: TrustedFile) -> None:
    file.path.unlink()
    assert not Trust().reload()
    HttpClient("http://engine", trust=Trust())
    with pytest.raises(TrustError):
        HttpClient("https://engine", trust=Trust())


@pytest.mark.parametrize("name", ["missing.pem", "."])
def test_a_file_that_cannot_be_read_is_named(file: TrustedFile, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = file.path.parent / name
    monkeypatch.setenv(FILE, str(path))
    with pytest.raises(TrustError, match=rf"^SSL_CERT_FILE={path} cannot be read: (No such file|Is a directory)"):
        Trust().load()


def test_a_file_without_certificates_is_named(file: TrustedFile) -> None:
    file.write(b"no certificate")
    with pytest.raises(TrustError, match=rf"^SSL_CERT_FILE={file.path} has no certificates"):
        Trust().load()


def test_one_directory_has_to_be_there(file: TrustedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORIES, "/none/such")
    with pytest.raises(TrustError, match=r"^SSL_CERT_DIR=/none/such cannot be read"):
        Trust().load()
    monkeypatch.setenv(DIRECTORIES, f"/none/such:{file.path.parent}")
    Trust().load()


async def test_a_reload_is_for_new_connections(file: TrustedFile, first: Authority, second: Authority) -> None:
    trust = Trust()
    async with serving(always, server_tls=second.server(), trust=trust) as (engine, client):
        file.has(second)
        assert trust.reload()
        assert await ask(client) == b"ok"
        file.has(first)
        assert trust.reload()
        assert await ask(client) == b"ok", "its connection is open"
        with pytest.raises(EngineUnreachableError):
            await ask(HttpClient(f"https://localhost:{engine.port}", trust=trust))


async def test_a_refused_certificate_lets_a_changed_file_be_read_again(file: TrustedFile, second: Authority) -> None:
    trust = Trust()
    async with serving(always, server_tls=second.server(), trust=trust) as (engine, client):
        with pytest.raises(EngineUnreachableError):
            await ask(client)
        file.has(second)
        assert await asyncio.gather(*(ask(client) for _ in range(5))) == [b"ok"] * 5
        assert len(engine.peers) == 5


async def test_a_file_that_was_spoilt_changes_nothing(file: TrustedFile, second: Authority) -> None:
    trust = Trust()
    async with serving(always, server_tls=second.server(), trust=trust) as (_, client):
        before = trust.context
        file.write(b"half a certif")
        with pytest.raises(EngineUnreachableError):
            await ask(client)
        assert trust.problem is not None
        with pytest.raises(TrustError):
            trust.reload()
        assert trust.context is before
        file.has(second)
        assert await ask(client) == b"ok"
        assert trust.problem is None


def test_a_file_that_is_replaced_by_another_has_changed(file: TrustedFile, second: Authority) -> None:
    """Kubernetes mounts a secret by a link, and moves the link."""
    trust, times = Trust(), file.path.stat()
    trust.load()
    before = trust.context
    assert not trust.renew(before)
    other = TrustedFile(file.path.with_suffix(".new"), second).path
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.rename(file.path)
    assert trust.renew(before)
