"""Certificates for tests, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from plait.backends.http.trust import DIRECTORIES, FILE, Trust

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
_CONFIG = """
[ca]
default_ca = here
[here]
database = {folder}/index
serial = {folder}/serial
new_certs_dir = {folder}
default_md = sha256
policy = any
copy_extensions = copy
x509_extensions = issued
[issued]
authorityKeyIdentifier = keyid
[any]
commonName = supplied
"""


class Authority:
    """An issuer of certificates, with its own in the file `certificate`. Its files are in `folder`, which is made."""

    def __init__(self, folder: Path, name: str = "Test CA") -> None:
        folder.mkdir()
        self.folder = folder
        self.certificate = folder / "ca.pem"
        (folder / "index").touch()
        (folder / "serial").write_text("01\n")
        (folder / "index.attr").write_text("unique_subject = no\n")
        (folder / "config").write_text(_CONFIG.format(folder=folder))
        files = ["-keyout", str(folder / "ca.key"), "-out", str(self.certificate)]
        subject = ["-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign"]  # as Python 3.13 wants it
        _openssl("req", "-x509", *_KEY, *subject, "-days", "2", *files)

    def issue(
        self, name: str = "DNS:localhost", *, begins: str = "20200101000000Z", ends: str = "20991231235959Z"
    ) -> tuple[Path, Path]:
        """The files of a certificate for a server, and of its key. It is valid between these times."""
        request, key, certificate = (self.folder / f"server.{end}" for end in ("csr", "key", "pem"))
        names = ["-subj", "/CN=server", "-addext", f"subjectAltName={name}"]
        _openssl("req", "-new", *_KEY, *names, "-keyout", str(key), "-out", str(request))
        own = ["-config", str(self.folder / "config"), "-cert", str(self.certificate)]
        own += ["-keyfile", str(self.folder / "ca.key")]
        dates = ["-startdate", begins, "-enddate", ends]
        _openssl("ca", "-batch", "-notext", *own, *dates, "-in", str(request), "-out", str(certificate))
        return certificate, key

    def server(self, name: str = "DNS:localhost", **dates: str) -> ssl.SSLContext:
        """TLS of a server with a certificate of this issuer."""
        return server_with(*self.issue(name, **dates))


def self_signed(folder: Path) -> ssl.SSLContext:
    """TLS of a server that has issued its own certificate."""
    certificate, key = folder / "self.pem", folder / "self.key"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    _openssl("req", "-x509", *_KEY, *names, "-days", "2", "-keyout", str(key), "-out", str(certificate))
    return server_with(certificate, key)


def server_with(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS of a server with these files."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    return tls


def trusting(file: Path, environment: pytest.MonkeyPatch) -> Trust:
    """The trust of a process whose environment names this file and nothing else, as it does from now on."""
    environment.setenv(FILE, str(file))
    environment.delenv(DIRECTORIES, raising=False)
    return Trust()


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
