"""A real PostgreSQL: `python -m e2e.postgresql.server` installs Debian's packages where it or PgBouncer is missing.

A server runs as another user where the tests run as root, which PostgreSQL refuses.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Any, Final, Self

from e2e.ports import free_port
from e2e.server_process import eventually
from tests.waiting import WITHIN_S

POOLER: Final = Path("/usr/sbin/pgbouncer")
ABSENT: Final = "no PostgreSQL is installed: `python -m e2e.postgresql.server` installs it"
SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "32MB",
    "max_connections": "40",
    "autovacuum_naptime": "10s",
}
PASSWORD: Final = "of-the-tests"
USER: Final = "plait"


def binaries() -> Path | None:
    """The folder of the newest version's programs; None if there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


def install() -> None:
    """Install the packages, without a database of their own. Raises `CalledProcessError` if no mirror has them."""
    there = {"postgresql": binaries() is not None, "pgbouncer": POOLER.exists()}
    missing = [package for package, is_there in there.items() if not is_there]
    if not missing or shutil.which("apt-get") is None or os.geteuid():
        return
    folder = Path("/etc/postgresql-common/createcluster.d")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plait-tests.conf").write_text("create_main_cluster = false\nstart_conf = manual\n")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing]
    if subprocess.run(command, env=quiet, check=False).returncode:
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        subprocess.run(command, env=quiet, check=True)


class Postgres:
    """A server with an empty database, in a folder of its own, from entering to leaving. `fsync` as a user has it."""

    def __init__(self, *, fsync: bool = False) -> None:
        found = binaries()
        assert found is not None, ABSENT
        self._programs = found
        self._settings = {**SETTINGS, "fsync": "on" if fsync else "off"}
        self._folder = Path(mkdtemp(prefix="plait-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"
        """Without the password, which is `PASSWORD`."""

    def __enter__(self) -> Self:
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        if (user := server_user().get("user")) is not None:
            for path in (self._folder, secret):
                os.chown(path, user, -1)
        options = ["--auth=scram-sha-256", f"--username={USER}", f"--pwfile={secret}", "--no-sync", "--encoding=UTF8"]
        command = [str(self._programs / "initdb"), "--pgdata", str(self._data), *options]
        made = subprocess.run(command, cwd=self._folder, capture_output=True, check=False, **server_user())
        assert not made.returncode, made.stderr.decode()
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = [f"--{name}={value}" for name, value in {**self._settings, "port": self.port}.items()]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), "-D", str(self._data), *options],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **server_user(),
            )  # fmt: skip
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        eventually(lambda: subprocess.run(ready, check=False).returncode == 0)

    def stop(self) -> None:
        """End it as an administrator does who cannot wait: clients lose their connections."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End it at once, without a checkpoint."""
        self._end(signal.SIGQUIT)

    def freeze(self) -> None:
        """Stop all its processes (SIGSTOP): connections stay, and nothing is answered."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        """Signal the first process, which then makes no more, and its children.

        The list of children may lack some while others end, so it is read again.
        """
        assert self._process is not None
        first = self._process.pid
        os.kill(first, number)
        for _ in range(3):
            for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), number)

    def run(self, statement: str, url: str | None = None) -> str:
        """What `psql` prints for a statement; `url` is that of a database other than the first."""
        command = [
            str(self._programs / "psql"),
            url or self.url,
            "--no-psqlrc",
            "--tuples-only",
            "--no-align",
            "-c",
            statement,
        ]
        done = subprocess.run(
            command, env={**os.environ, "PGPASSWORD": PASSWORD}, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def _end(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
            self._process.wait(WITHIN_S)
            self._process = None


def server_user() -> dict[str, Any]:
    """The user that runs a server, as options of `Popen`: this one, unless that is root."""
    if os.geteuid():
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


_numbers: Final = count()


@cache
def shared_postgres() -> Postgres:
    """The database server of this test run. `stop_shared_postgres` ends it."""
    os.environ["PGPASSWORD"] = PASSWORD
    return Postgres().__enter__()


def stop_shared_postgres() -> None:
    """End the database server, if there is one."""
    if shared_postgres.cache_info().currsize:
        shared_postgres().__exit__(None, None, None)
        shared_postgres.cache_clear()


def new_database(postgres: Postgres) -> str:
    """The URL of an empty database."""
    name = f"plait_{os.getpid()}_{next(_numbers)}"
    postgres.run(f"CREATE DATABASE {name}")
    return f"{postgres.url.rpartition('/')[0]}/{name}"


if __name__ == "__main__":
    started_s = time.monotonic()
    install()
    sys.stderr.write(f"PostgreSQL: {time.monotonic() - started_s:.0f} s\n")
