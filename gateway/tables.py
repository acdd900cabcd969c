"""Tables of a guest's own in a database: PostgreSQL, a file of SQLite, or memory, with the same statements.

In a statement `{}` stands before the name of a table, and `%s` for a value.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any, Final, ParamSpec, TypeVar

import structlog

P = ParamSpec("P")
T = TypeVar("T")

Run = Callable[..., list[Any]]
"""Runs a statement with its values, and returns its rows."""

PAGE_BYTES: Final = 2**14
"""The page size of a new SQLite file. Large rows take a third less time to write than with SQLite's own 4 KiB."""

WAL_BYTES: Final = 2**22
"""A WAL of SQLite of this length is written to the file, and one that became longer is cut then."""

LIMIT_S: Final = 5.0
"""A database that has not done a guest's work by then does not answer, although its machine may."""

REST_S: Final = 1.0
"""After a failure all work fails at once for so long: what waits in a row would wait for a time-out each."""

LEFT_BYTES: Final = 2**29
"""What may grow large leaves so much of a disk, or a tenth of a small one, so that all else is still written."""

MIGRATION_LOCK: Final = 0x706C6974
"""As the store's own migrations."""

log = structlog.get_logger(__name__)


class TablesError(Exception):
    """The database does not answer, or a later version of Plait has made the tables."""


class DiskFullError(TablesError):
    """The disk has hardly any room left. What needs none is still done."""


class UncertainError(TablesError):
    """The connection was lost in the middle of a commit, so nobody knows whether it was done."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one guest, whose `version` is in the table `NAME_version`. `statements` make those that lack."""

    name: str
    version: int
    statements: Sequence[str]


class Database:
    """One connection, which is made when it is needed. Synchronous; one thread calls all methods.

    `connect` makes a DB-API connection in autocommit mode and raises one of `errors`. `begin` begins a transaction that
    writes, `prefix` stands before the names of tables, `mark` for a value. `cut` ends what a connection waits for,
    `has_room` tells whether the disk has room for what may grow large.
    """

    def __init__(
        self,
        tables: Tables,
        connect: Callable[[], Any],
        errors: tuple[type[Exception], ...],
        *,
        begin: str = "BEGIN IMMEDIATE",
        prefix: str = "",
        mark: str = "?",
        cut: Callable[[Any], None] | None = None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self.is_full = False
        """Whether the disk was nearly full when `check_room` looked last."""
        self._tables = tables
        self._connect = connect
        self._errors = errors
        self._begin = begin
        self._prefix = prefix
        self._mark = mark
        self._cut = cut
        self._has_room = has_room
        self._connection: Any = None

    @contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run statements, and commit them. Raises `TablesError`."""
        failure: type[TablesError] = TablesError
        try:
            if self._connection is None:
                self._connection = self._connect()
                self._migrate()
            self._run(self._begin)
            is_open = True
            try:
                yield self._run
                failure = UncertainError
                self._run("COMMIT")
                is_open = False
            finally:
                if is_open:
                    with suppress(*self._errors):
                        self._run("ROLLBACK")
        except self._errors as error:
            self.close()
            raise failure(" ".join(str(error).split())) from error

    def check_room(self) -> None:
        """Raise `DiskFullError` if the disk has no room for what may grow large."""
        was_full, self.is_full = self.is_full, not self._has_room()
        if self.is_full and not was_full:
            log.error("the disk is nearly full", of=self._tables.name)
        elif was_full and not self.is_full:
            log.info("the disk has room again", of=self._tables.name)
        if self.is_full:
            raise DiskFullError("the disk is nearly full")

    def interrupt(self) -> None:
        """End what another thread waits for, which fails, if that can be done."""
        if self._cut is not None and self._connection is not None:
            self._cut(self._connection)

    def close(self) -> None:
        if self._connection is not None:
            with suppress(*self._errors):
                self._connection.close()
            self._connection = None

    def _run(self, statement: str, *values: object) -> list[Any]:
        written = statement.replace("{}", self._prefix).replace("%s", self._mark)
        cursor = self._connection.execute(written, *([values] if values else []))
        return list(cursor.fetchall()) if cursor.description is not None else []

    def _migrate(self) -> None:
        name, version = self._tables.name, self._tables.version
        self._run(self._begin)
        if self._prefix:
            self._run("SELECT pg_advisory_xact_lock(%s)", MIGRATION_LOCK)
            self._run("CREATE SCHEMA IF NOT EXISTS plait")
        self._run(f"CREATE TABLE IF NOT EXISTS {{}}{name}_version (version BIGINT NOT NULL)")
        found = self._run(f"SELECT version FROM {{}}{name}_version")  # noqa: S608 - our own name
        if not found:
            self._run(f"INSERT INTO {{}}{name}_version VALUES (%s)", version)  # noqa: S608 - the same
        elif found[0][0] > version:
            self.close()
            raise TablesError(f"a later version of Plait keeps the {name} ({found[0][0]}, this one: {version})")
        for statement in self._tables.statements:
            self._run(statement)
        self._run("COMMIT")


def in_sqlite(tables: Tables, path: Path | None) -> Database:
    """Tables in a file, which is made with mode 0600; None: in memory."""

    def connect() -> sqlite3.Connection:
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        database = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False, timeout=5.0)
        if path is not None:
            database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            database.execute("PRAGMA auto_vacuum = FULL")  # what is deleted frees the disk
            _write_ahead(database)
            database.execute(f"PRAGMA wal_autocheckpoint = {WAL_BYTES // PAGE_BYTES}")
            database.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            database.execute("PRAGMA synchronous = NORMAL")
        return database

    def has_room() -> bool:
        if path is None or not path.parent.is_dir():
            return True
        disk = disk_usage(path.parent)
        return disk.free >= min(LEFT_BYTES, disk.total // 10)

    return Database(tables, connect, (sqlite3.Error, OSError), has_room=has_room)


def _write_ahead(database: sqlite3.Connection) -> None:
    """Give the file a WAL. SQLite itself waits for no other connection that does so to a new file at this moment."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                raise
            time.sleep(0.01)
        else:
            return


def in_postgresql(tables: Tables, url: str) -> Database:
    """Tables in the database that gateways share."""
    import psycopg  # noqa: PLC0415 - an extra has it

    def connect() -> psycopg.Connection[Any]:
        waits: dict[str, Any] = {
            "connect_timeout": 3,
            "tcp_user_timeout": 5_000,
            "keepalives_idle": 2,
            "keepalives_interval": 1,
        }
        # A pooler gives each transaction any session, so no prepared statement is left.
        return psycopg.connect(url, autocommit=True, prepare_threshold=None, **waits)

    def cut(connection: psycopg.Connection[Any]) -> None:
        with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as one:
            one.shutdown(socket.SHUT_RDWR)

    begin = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '2s'; SET LOCAL lock_timeout = '2s'"
    return Database(tables, connect, (psycopg.Error,), begin=begin, prefix="plait.", mark="%s", cut=cut)


class TablesThread:
    """Works with a database in a thread of its own, in order, so that the event loop never waits for it.

    `problem`: why the latest work failed; None: it did not. `what` names it in the log. `interrupt` ends work that
    takes longer than `LIMIT_S`; None: nothing does.
    """

    def __init__(self, what: str, interrupt: Callable[[], None] | None = None) -> None:
        self.problem: str | None = None
        self._what = what
        self._interrupt = interrupt
        self._turn = asyncio.Lock()
        self._rests_until_s = 0.0
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns. Raises `TablesError`, and what else it raises."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            if self._is_closed:
                raise TablesError("the gateway stops")
            if self.problem is not None and loop.time() < self._rests_until_s:
                raise TablesError(self.problem)
            try:
                done = await self._done(lambda: work(*args, **kwargs))
            except DiskFullError:
                raise
            except TablesError as error:
                if self.problem is None:
                    log.error("the database does not answer", of=self._what, problem=str(error))  # noqa: TRY400 - no defect
                self.problem, self._rests_until_s = str(error), loop.time() + REST_S
                raise
            if self.problem is not None:
                log.info("the database answers again", of=self._what)
            self.problem = None
            return done

    async def _done(self, work: Callable[[], T]) -> T:
        """What `work` returns, which is interrupted each `LIMIT_S`: a first time it may still make the connection."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        if self._interrupt is None:
            return await done
        try:
            while not (await asyncio.wait((done,), timeout=LIMIT_S))[0]:
                self._interrupt()
            return done.result()
        finally:
            done.cancel()

    async def close(self, close: Callable[[], None]) -> None:
        """Call `close` once the work under way is done, and end the thread. What comes later fails."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, close)
        self._thread.shutdown()
