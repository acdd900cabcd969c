"""The certificates that engines' certificates are checked against: the system's, or those that the environment names.

OpenSSL reads `SSL_CERT_FILE` and `SSL_CERT_DIR` once, when a context is made, and ignores a missing file. A gateway
runs for months, in which an issuer's certificate is renewed. So the files are read again at SIGHUP, and when an
engine's certificate is refused and the files have changed. Open connections stay open.
"""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Final

FILE: Final = "SSL_CERT_FILE"
DIRECTORIES: Final = "SSL_CERT_DIR"
"""The variables of the environment that OpenSSL knows. The second may name several, separated by colons."""

_Stamp = tuple[tuple[int, int, int] | None, ...]
"""Modification time (ns), inode and size of each file and directory; None for a missing one."""


class TrustError(ValueError):
    """The certificates that the environment names cannot be read. The message has the variable and the path."""


class Trust:
    """The certificates as they were last read. Nothing is read before the first `load`."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why the files could not be read the last time. The certificates read before stay in use."""
        self._context: ssl.SSLContext | None = None
        self._any_name: ssl.SSLContext | None = None
        self._read: _Stamp = ()

    @property
    def context(self) -> ssl.SSLContext:
        """For new connections. Raises `TrustError` if nothing could be read so far."""
        self.load()
        assert self._context is not None
        return self._context

    @property
    def any_name(self) -> ssl.SSLContext:
        """For looking at a certificate: accepts one for another host name. Raises `TrustError`."""
        if self._any_name is None:
            self._any_name = _new_context()
            self._any_name.check_hostname = False
        return self._any_name

    @property
    def source(self) -> str:
        """Where the certificates are from, for people."""
        named = [f"{name}={value}" for name in (FILE, DIRECTORIES) if (value := os.environ.get(name))]
        return " and ".join(named) or f"the system; {FILE} names others"

    def load(self) -> None:
        """Read the certificates once, which blocks the event loop for 40 ms. Raises `TrustError`."""
        if self._context is None:
            self._read_files()

    def reload(self) -> bool:
        """Read the certificates again; False if they were never needed. On `TrustError` the old ones stay in use."""
        if self._context is None:
            return False
        self._read_files()
        return True

    def renew(self, used: ssl.SSLContext | None) -> bool:
        """Read the certificates again if their files have changed. Returns whether they differ from those `used`.

        An error is kept as the `problem` until the files change again.
        """
        if _stamp() != self._read:
            with suppress(TrustError):
                self._read_files()
        return self._context is not used

    def _read_files(self) -> None:
        self._read = _stamp()  # before the reading, so that a change during the reading is seen next time
        try:
            self._context, self._any_name = _new_context(), None
        except TrustError as error:
            self.problem = str(error)
            raise
        self.problem = None


SYSTEM_TRUST: Final = Trust()
"""The trust by this process's environment."""


def _new_context() -> ssl.SSLContext:
    file, directories = os.environ.get(FILE), os.environ.get(DIRECTORIES)
    if file:
        try:
            Path(file).open("rb").close()
        except OSError as error:
            raise TrustError(f"{FILE}={file} cannot be read: {error.strerror}") from error
    if directories and not any(Path(one).is_dir() for one in directories.split(os.pathsep)):
        raise TrustError(f"{DIRECTORIES}={directories} cannot be read: there is no such directory")
    context = ssl.create_default_context()
    if file and not context.cert_store_stats()["x509"]:
        raise TrustError(f"{FILE}={file} has no certificates in PEM form")
    return context


def _stamp() -> _Stamp:
    defaults = ssl.get_default_verify_paths()
    directories = os.environ.get(DIRECTORIES) or defaults.openssl_capath
    return tuple(map(_stat, (os.environ.get(FILE) or defaults.openssl_cafile, *directories.split(os.pathsep))))


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
