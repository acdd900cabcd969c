"""The secret of tenants' identities and sealed thoughts: `server.secret`, or a file that the first start writes."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile
from typing import Final

import structlog

from plait.gateway.config.file import ConfigError
from plait.gateway.config.sections import Config
from plait.gateway.config.values import SECRET_PATTERN

SECRET_FILE: Final = "plait.secret"  # noqa: S105 - a name
SECRET_BYTES: Final = 32
FOR_OTHERS: Final = 0o077
"""The bits of a file's mode that let group and others use the file."""

log = structlog.get_logger(__name__)


def server_secret(config: Config, path: Path | None) -> bytes:
    """The secret. `path` is the configuration's file; None: no file, and so no keys.

    If there is no secret, a new one is written to the file beside `path`. If clients need no keys, or the file cannot
    be written, the new secret ends with the process; a warning says so where keys depend on it. Raises `ConfigError` if
    the file has no valid secret.
    """
    if config.is_open or path is None:
        return (config.server.secret or token_hex(SECRET_BYTES)).encode()
    file, secret = secret_file(path), known_secret(config, path)
    if secret is None:
        try:
            _make(file)
        except OSError as error:
            log.warning(
                "tenants' labels and cache salts end with this process: set server.secret to keep them",
                file=str(file),
                problem=error.strerror,
            )
            return token_hex(SECRET_BYTES).encode()
        log.info("secret made", file=str(file))
        secret = _read(file)
        assert secret is not None, "the file was just made"
    if config.server.secret is None and file.stat().st_mode & FOR_OTHERS:
        log.warning("the server's secret can be read by others: give the file the mode 0600", file=str(file))
    return secret


def known_secret(config: Config, path: Path) -> bytes | None:
    """The secret in the configuration or in the file beside it; None if there is none yet, or clients need no keys.

    Raises `ConfigError` if the file has no valid secret.
    """
    if config.is_open:
        return None
    return _read(secret_file(path)) if config.server.secret is None else config.server.secret.encode()


def secret_file(path: Path) -> Path:
    return path.absolute().with_name(SECRET_FILE)


def _read(file: Path) -> bytes | None:
    try:
        secret = file.read_bytes().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if not re.match(SECRET_PATTERN.encode(), secret):
        raise ConfigError(
            f"{file}: expected a secret, which has 32 or more characters of printable ASCII without spaces. "
            "Delete the file, and another one is made; or set server.secret."
        )
    return secret


def _make(file: Path) -> None:
    """Write a new secret, whole or not at all. If several gateways start at the same time, the first one's stays."""
    with NamedTemporaryFile("w", prefix=f".{file.name}-", dir=file.parent, encoding="ascii") as draft:  # of mode 0600
        draft.write(f"{token_hex(SECRET_BYTES)}\n")
        draft.flush()
        os.fsync(draft.fileno())
        with suppress(FileExistsError):
            file.hardlink_to(draft.name)
