"""A real PgBouncer before a PostgreSQL, as managed databases have one: each transaction may get another session."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Final, Self

import psycopg

from e2e.ports import free_port
from e2e.postgresql.server import PASSWORD, POOLER, USER, Postgres, server_user
from e2e.server_process import eventually
from tests.waiting import WITHIN_S

ABSENT: Final = "no PgBouncer is installed: `python -m e2e.postgresql.server` installs it"
CONFIG: Final = """
[databases]
* = host=127.0.0.1 port={server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {folder}/users
logfile = {folder}/log
pool_mode = {mode}
default_pool_size = 2
{more}
"""
"""All else as Debian has it: no startup parameter that it does not know, and no prepared statements."""


class Pooler:
    """A pooler with two sessions of each database, from entering to leaving; `more` are lines of its configuration."""

    def __init__(self, postgres: Postgres, *, mode: str = "transaction", more: str = "") -> None:
        self._folder = Path(mkdtemp(prefix="plait-pooler-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._values = {"server": postgres.port, "mode": mode, "more": more, "folder": self._folder}
        self.port = free_port()

    def __enter__(self) -> Self:
        (self._folder / "users").write_text(f'"{USER}" "{PASSWORD}"\n')
        config = self._folder / "pgbouncer.ini"
        config.write_text(CONFIG.format(port=self.port, **self._values))
        user = server_user()
        if "user" in user:
            os.chown(self._folder, user["user"], -1)
        self._process = subprocess.Popen([str(POOLER), "--quiet", str(config)], stdin=subprocess.DEVNULL, **user)
        eventually(self._is_ready)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(WITHIN_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def url_of(self, database: str) -> str:
        """The URL of a database, through the pooler."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database.rpartition('/')[2]}"

    def _is_ready(self) -> bool:
        try:
            psycopg.connect(self.url_of("postgres"), password=PASSWORD).close()
        except psycopg.OperationalError:
            return False
        return True
