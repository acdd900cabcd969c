"""A log of events in one SQLite file, for one gateway at a time.

The file is in WAL mode. What is written with `synchronous = "normal"` outlives the process, however that ends, and with
"full" the machine's power, too. A lock on the file beside it (`.lock`) says that a process holds the lease. The kernel
takes the lock away when the process ends, so the next one need not wait for a time to pass.

A stream has a number, and its events have the ids after that number, shifted. So they lie together, and are found and
deleted without an index.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Final, Literal
from zlib import crc32

import structlog

from plait.gateway.store.event_log import (
    Change,
    CorruptStoreError,
    HeldElsewhereError,
    LeaseLostError,
    StoredStream,
    StoreError,
    StoreVersionError,
    StreamKey,
)
from plait.gateway.store.file_place import check_place, make_place

APPLICATION_ID: Final = 0x706C6974
"""Says that a SQLite file is Plait's ("plit")."""

EVENTS_BITS: Final = 24
"""A stream has at most 2**24 events: a session may have 200,000 variables. 2**39 streams are left."""

AT_ONCE: Final = 64
"""So many events are written in one statement, which is a transaction of its own: it takes four fifths of the time."""

Synchronous = Literal["normal", "full"]
Migration = Callable[[sqlite3.Connection], None]

log = structlog.get_logger(__name__)


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


MIGRATIONS: Final[tuple[Migration, ...]] = (_first,)
"""Each leads to the next version of the schema, which is the number of those before and including it."""


class SqliteKeeper:
    """Keeps a log in the file `path`. `owner` names the gateway; all that share one file have one name."""

    def __init__(
        self,
        path: Path,
        synchronous: Synchronous = "normal",
        *,
        owner: str = "gateway",
        migrations: Sequence[Migration] = MIGRATIONS,
    ) -> None:
        self.path = path
        self._synchronous = synchronous
        self._owner = owner
        self._migrations = migrations
        self._epoch = 0
        self._lock: int | None = None
        self._streams: dict[StreamKey, tuple[int, int]] = {}  # each one's number, and how many events it has had
        self._next_stream = 1
        self._has_deleted = False
        self._database: sqlite3.Connection | None = None

    def __repr__(self) -> str:
        return f"SqliteKeeper({str(self.path)!r}, epoch={self._epoch})"

    def check(self) -> None:
        """Raise ValueError for a place where the file cannot be, or a file that a later version has written."""
        check_place(self.path)
        with suppress(sqlite3.DatabaseError, OSError):  # a corrupt file is looked at when it is opened
            if self.path.exists() and self.path.stat().st_size:
                with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                    self._check_version(database)

    def open(self) -> int:
        """Take the lease, bring the schema up to date. A file that cannot be read is set aside, and said so."""
        try:
            make_place(self.path)
            self._take_lock()
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}") from error
        try:
            self._connect()
        except (sqlite3.DatabaseError, CorruptStoreError) as error:
            self._disconnect()
            if not _is_corrupt(error):
                raise StoreError(f"{self.path}: {error}") from error
            self.set_aside(error)
            with _translated(self.path):
                self._connect()
        return self._epoch

    def set_aside(self, problem: Exception) -> None:
        """Keep a file that cannot be read under another name. A new one is begun in its place."""
        self._disconnect()
        aside = f"{self.path}.corrupt-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(f"{aside}{suffix}")
        make_place(self.path)
        log.error(
            "the store cannot be read: it was set aside, and sessions begin anew",
            file=str(self.path), kept_as=aside, problem=str(problem), hint=f"sqlite3 {aside} .recover",
        )  # fmt: skip

    def read(self) -> Iterator[StoredStream]:
        """All streams. Sets the file aside and raises `CorruptStoreError` if one of them cannot be read."""
        with _translated(self.path):
            rows = self._opened.execute("SELECT stream, kind, tenant, name FROM streams ORDER BY stream").fetchall()
        for number, *names in rows:
            stream = self._stored(number, StreamKey(*names))
            self._streams[stream.key] = number, len(stream.events)
            yield stream

    def stream(self, key: StreamKey) -> StoredStream:
        """One stream."""
        number, _ = self._streams.get(key, (0, 0))
        return self._stored(number, key)

    def write(self, changes: Sequence[Change]) -> None:
        """Write these in one transaction, if the lease is still held."""
        database, before = self._opened, (dict[StreamKey, tuple[int, int]](), self._next_stream)
        try:
            if self._go_on(changes):
                with _translated(self.path):
                    self._append(database, [self._row(database, change, before[0]) for change in changes])
                return
            with _translated(self.path), _transaction(database):
                self._check_lease(database)
                for is_end, run in groupby(changes, lambda change: change.data is None):
                    if is_end:
                        for change in run:
                            self._delete(database, change.stream, before[0])
                    else:
                        rows = [self._row(database, change, before[0]) for change in run]
                        database.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)
        except StoreError:
            self._undo(*before)
            raise

    def tidy(self) -> None:
        """Take deleted values out of the WAL, too."""
        if self._has_deleted and self._database is not None:
            with suppress(sqlite3.Error):
                busy, *_ = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                self._has_deleted = bool(busy)

    def close(self) -> None:
        """Bring the file up to date, and give the lease up."""
        self._disconnect()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _opened(self) -> sqlite3.Connection:
        assert self._database is not None, "it is opened first"
        return self._database

    def _stored(self, number: int, key: StreamKey) -> StoredStream:
        """The stream of this number, which is no stream's if it is 0."""
        with _translated(self.path):
            rows = self._opened.execute(
                "SELECT version, at_unix_s, checksum, data, event FROM events WHERE event BETWEEN ? AND ? "
                "ORDER BY event", _ids(number),
            ).fetchall()  # fmt: skip
        for *_, checksum, data, event in rows:
            if crc32(data) != checksum:
                raise CorruptStoreError(f"event {event} of {key.kind} {key.name!r} is not what was written")
        return StoredStream(key, [Change(key, at_unix_s, data, version) for version, at_unix_s, _, data, _ in rows])

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = os.open(f"{self.path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 64, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise HeldElsewhereError(f"{self.path} is held by another gateway (process {holder})") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        self._lock = lock

    def _connect(self) -> None:
        database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._database = database
        database.execute("PRAGMA secure_delete = ON")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {self._synchronous}")
        self._check_version(database)
        found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise CorruptStoreError(found)
        self._migrate(database)
        with _transaction(database):
            database.execute(
                "INSERT INTO leases VALUES (?, 1, NULL) ON CONFLICT (owner) DO UPDATE SET epoch = epoch + 1",
                (self._owner,),
            )
            self._epoch = self._epoch_of(database)
            database.execute("UPDATE streams SET owner = ?, epoch = ?", (self._owner, self._epoch))
        self._streams.clear()
        self._next_stream = 1 + (database.execute("SELECT max(stream) FROM streams").fetchone()[0] or 0)

    def _disconnect(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _check_version(self, database: sqlite3.Connection) -> None:
        application = database.execute("PRAGMA application_id").fetchone()[0]
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if application not in {0, APPLICATION_ID} or (
            application == 0 and database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        ):
            raise StoreVersionError(f"{self.path} is a database of another program: name another file")
        if version > len(self._migrations):
            raise StoreVersionError(
                f"{self.path} was written by a later version of Plait (schema {version}, this one knows "
                f"{len(self._migrations)}): use that version, or name another file"
            )

    def _migrate(self, database: sqlite3.Connection) -> None:
        """Bring the schema forward, to the latest version or not at all."""
        with _transaction(database):
            version = database.execute("PRAGMA user_version").fetchone()[0]
            for migration in self._migrations[version:]:
                migration(database)
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {len(self._migrations)}")

    def _epoch_of(self, database: sqlite3.Connection) -> int:
        row = database.execute("SELECT epoch FROM leases WHERE owner = ?", (self._owner,)).fetchone()
        return 0 if row is None else int(row[0])

    def _check_lease(self, database: sqlite3.Connection) -> None:
        epoch = self._epoch_of(database)
        if epoch != self._epoch:
            raise LeaseLostError(f"{self.path} was taken over (epoch {epoch}, this gateway's was {self._epoch})")

    def _go_on(self, changes: Sequence[Change]) -> bool:
        """Whether these are a few further events of streams that have begun."""
        is_few = 0 < len(changes) <= AT_ONCE
        return is_few and all(change.data is not None and change.stream in self._streams for change in changes)

    def _append(self, database: sqlite3.Connection, rows: Sequence[tuple[object, ...]]) -> None:
        """Write these, and nothing else, if the lease is still held."""
        values = [value for row in rows for value in row]
        if not database.execute(_appending(len(rows)), (*values, self._owner, self._epoch)).rowcount:
            self._check_lease(database)

    def _row(
        self, database: sqlite3.Connection, change: Change, before: dict[StreamKey, tuple[int, int]]
    ) -> tuple[int, int, float, int, bytes]:
        """The row of an event, which begins its stream if there is none."""
        known, data = self._streams.get(change.stream), change.data
        assert data is not None
        before.setdefault(change.stream, known or (0, 0))
        if known is None:
            known = self._next_stream, 0
            self._next_stream += 1
            row = (known[0], *change.stream, self._owner, self._epoch)
            database.execute("INSERT INTO streams VALUES (?, ?, ?, ?, ?, ?)", row)
        number, events = known
        self._streams[change.stream] = number, events + 1
        return (number << EVENTS_BITS) + events, change.version, change.at_unix_s, crc32(data), data

    def _delete(self, database: sqlite3.Connection, key: StreamKey, before: dict[StreamKey, tuple[int, int]]) -> None:
        known = self._streams.pop(key, None)
        if known is not None:
            before.setdefault(key, known)
            self._has_deleted = True
            database.execute("DELETE FROM events WHERE event BETWEEN ? AND ?", _ids(known[0]))
            database.execute("DELETE FROM streams WHERE stream = ?", (known[0],))

    def _undo(self, before: dict[StreamKey, tuple[int, int]], next_stream: int) -> None:
        """The streams are as they were: nothing was written."""
        for key, known in before.items():
            if known == (0, 0):
                self._streams.pop(key, None)
            else:
                self._streams[key] = known
        self._next_stream = next_stream


@cache
def _appending(events: int) -> str:
    """The statement that writes so many events if an owner has an epoch."""
    rows = ", ".join(["(?, ?, ?, ?, ?)"] * events)
    lease = "(SELECT epoch FROM leases WHERE owner = ?) = ?"
    return f"INSERT INTO events SELECT * FROM (VALUES {rows}) WHERE {lease}"  # noqa: S608 - question marks


def _ids(stream: int) -> tuple[int, int]:
    """The ids of the first and the last event that a stream can have."""
    return stream << EVENTS_BITS, ((stream + 1) << EVENTS_BITS) - 1


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """SQLite's errors become `StoreError`s."""
    try:
        yield
    except sqlite3.Error as error:
        kind = CorruptStoreError if _is_corrupt(error) else StoreError
        raise kind(f"{path}: {error}") from error


def _is_corrupt(error: Exception) -> bool:
    codes = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
    return isinstance(error, CorruptStoreError) or (getattr(error, "sqlite_errorcode", 0) & 0xFF) in codes
