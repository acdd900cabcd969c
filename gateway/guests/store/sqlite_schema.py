"""The tables of a store in a SQLite file, and the migrations from earlier versions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from plait.gateway.guests.store.event_log import CorruptStoreError, StoreVersionError

APPLICATION_ID: Final = 0x706C6974
"""Marks a SQLite file as Plait's ("plit")."""

Migration = Callable[[sqlite3.Connection], None]


def _first(database: sqlite3.Connection) -> None:
    database.execute("CREATE TABLE leases (owner TEXT PRIMARY KEY, epoch INTEGER NOT NULL, until_unix_s REAL)")
    database.execute(
        "CREATE TABLE streams (stream INTEGER PRIMARY KEY, kind TEXT NOT NULL, tenant TEXT NOT NULL, "
        "name TEXT NOT NULL, owner TEXT NOT NULL, epoch INTEGER NOT NULL, UNIQUE (kind, tenant, name))"
    )
    database.execute(
        "CREATE TABLE events (event INTEGER PRIMARY KEY, version INTEGER NOT NULL, at_unix_s REAL NOT NULL, "
        "checksum INTEGER NOT NULL, data BLOB NOT NULL)"
    )


def _second(database: sqlite3.Connection) -> None:
    database.execute("ALTER TABLE leases ADD COLUMN version INTEGER NOT NULL DEFAULT 1")


MIGRATIONS: Final[tuple[Migration, ...]] = (_first, _second)
"""Each leads to the next version. A version is the number of migrations that led to it."""


class Schema:
    """The schema after all `migrations`. `version` is the latest version of events that this release can read."""

    def __init__(self, path: Path, version: int, migrations: Sequence[Migration] = MIGRATIONS) -> None:
        self._path = path
        self._version = version
        self._migrations = migrations

    def check(self, database: sqlite3.Connection) -> None:
        """Raise `StoreVersionError` for a file of another program or a later version, which must not be touched.

        Raises `CorruptStoreError` if the tables are not those of the file's version.
        """
        application = database.execute("PRAGMA application_id").fetchone()[0]
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if application not in {0, APPLICATION_ID} or (
            application == 0 and database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        ):
            raise StoreVersionError(f"{self._path} is a database of another program: name another file")
        self._check_version("schema", version, len(self._migrations))
        if _tables(database) != self._tables_of(version):
            raise CorruptStoreError(f"its tables are not those of schema {version}")
        if version > 1:
            events = database.execute("SELECT max(version) FROM leases").fetchone()[0]
            self._check_version("events", events or 0, self._version)

    def migrate(self, database: sqlite3.Connection) -> None:
        """Migrate to the latest version, in one transaction."""
        with transaction(database):
            version = database.execute("PRAGMA user_version").fetchone()[0]
            for migration in self._migrations[version:]:
                migration(database)
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {len(self._migrations)}")

    def _tables_of(self, version: int) -> Sequence[tuple[str, ...]]:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
            for migration in self._migrations[:version]:
                migration(database)
            return _tables(database)

    def _check_version(self, what: str, found: int, known: int) -> None:
        if found > known:
            raise StoreVersionError(
                f"{self._path} was written by a later version of Plait ({what} {found}, this one knows {known}): "
                "use that version, or name another file"
            )


def _tables(database: sqlite3.Connection) -> Sequence[tuple[str, ...]]:
    """The definitions of all tables and indexes, without SQLite's internal ones (ANALYZE)."""
    own = "name LIKE 'sqlite@_%' ESCAPE '@'"
    asked = f"SELECT type, name, tbl_name, sql FROM sqlite_master WHERE NOT {own} ORDER BY rowid"  # noqa: S608 - constant
    return database.execute(asked).fetchall()


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit what the block does, or roll it back if it raises."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")
