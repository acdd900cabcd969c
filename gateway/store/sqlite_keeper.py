"""A log of events in one SQLite file, for one gateway at a time.

The file is in WAL mode. What is written with `synchronous = "normal"` outlives the process, however that ends, and with
"full" the machine's power, too. A lock on the file beside it (`.lock`) says that a process holds the lease. The kernel
takes the lock away when the process ends, so the next one need not wait for a time to pass.

What is found when the file is opened
    It is gone or empty, though the lock says that there was a store, or its WAL is there: it is not opened.
    A later version has had it, or another program: it is not opened.
    It is malformed, by SQLite's own check: it is set aside, and what can be read of it is written to a new one.
    The WAL ends before what its index has counted, or the epoch is lower than the lock says: it is opened, since what
        is there is a beginning of what was written, and said so.
    A stream is not what was written: it is read with its problem, and all others as they are.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

import structlog

from plait.gateway.store.damage import Damage
from plait.gateway.store.event_log import (
    Change,
    CorruptStoreError,
    LeaseLostError,
    StoredStream,
    StoreError,
    StreamKey,
)
from plait.gateway.store.file_place import check_place, make_file, make_folder
from plait.gateway.store.saved_file import SavedFile
from plait.gateway.store.sqlite_schema import MIGRATIONS, Migration, Schema, transaction
from plait.gateway.store.sqlite_streams import (
    EVENTS_BITS,
    SQLITE_ERRORS,
    Row,
    event_ids,
    last_stream,
    numbered_streams,
    readable_streams,
    row_of,
    stream_of,
    text_of,
)
from plait.gateway.store.store_lock import StoreLock
from plait.gateway.store.wal_index import committed_frames

AT_ONCE: Final = 64
"""So many events are written in one statement, which is a transaction of its own: it takes four fifths of the time."""

Synchronous = Literal["normal", "full"]

log = structlog.get_logger(__name__)


class SqliteKeeper:
    """Keeps a log in the file `path`. `owner` names the gateway; all that share one file have one name.

    `version` is the latest of events that it can read. `damage` counts what is found missing or changed.
    """

    def __init__(
        self,
        path: Path,
        synchronous: Synchronous = "normal",
        *,
        owner: str = "gateway",
        version: int = 1,
        damage: Damage | None = None,
        migrations: Sequence[Migration] = MIGRATIONS,
    ) -> None:
        self.path = path
        self._synchronous = synchronous
        self._owner = owner
        self._version = version
        self._damage = damage or Damage()
        self._schema = Schema(path, version, migrations)
        self._epoch = 0
        self._lock = StoreLock(path)
        self._saved_file = SavedFile(path)
        self._streams: dict[StreamKey, tuple[int, int]] = {}  # each one's number, and how many events it has had
        self._next_stream = 1
        self._saved_in_part: list[StoredStream] = []  # of a malformed file
        self._has_deleted = False
        self._database: sqlite3.Connection | None = None

    def __repr__(self) -> str:
        return f"SqliteKeeper({str(self.path)!r}, epoch={self._epoch})"

    def check(self) -> None:
        """Raise ValueError for a place where no file can be, one that it has vanished from, and a later version's."""
        check_place(self.path)
        gone = self._gone()
        if gone is not None:
            raise ValueError(gone)
        with suppress(*SQLITE_ERRORS, CorruptStoreError, OSError):  # `open` looks at a malformed file
            if self.path.exists() and self.path.stat().st_size:
                uri = f"{self.path.absolute().as_uri()}?immutable=1"  # the index of the WAL stays as it was left
                with closing(sqlite3.connect(uri, uri=True)) as database:
                    database.text_factory = text_of
                    self._schema.check(database)

    def open(self) -> int:
        """Take the lease, bring the schema up to date. A malformed file is set aside, and what can be read is saved."""
        with _translated(self.path):
            make_folder(self.path)
            self._lock.take()
            if self._is_half_saved:
                log.error("the store was malformed: what was saved of it takes its place", file=str(self.path))
                self._saved_file.replace(self._aside())
            gone = self._gone()
            if gone is not None:
                raise StoreError(gone)
            make_file(self.path)
        frames = committed_frames(self.path)
        try:
            self._connect(self.path, frames)
        except (*SQLITE_ERRORS, CorruptStoreError) as error:
            if not _is_corrupt(error):
                self._disconnect()
                raise StoreError(f"{self.path}: {error}") from error
            self._save(error)
        return self._epoch

    def read(self) -> Iterator[StoredStream]:
        try:
            streams = self._read()
        except CorruptStoreError as error:
            self._save(error)
            streams = self._read()
        in_part, self._saved_in_part = self._saved_in_part, []
        return iter(in_part + streams)

    def stream(self, key: StreamKey) -> StoredStream:
        known = self._streams.get(key)
        if known is None:
            return StoredStream(key, [])
        with _translated(self.path):
            return stream_of(self._opened, known[0], key)

    def write(self, changes: Sequence[Change], *, again: bool = False) -> None:  # noqa: ARG002 - a failure is known
        """Write these in one transaction, if the lease is still held."""
        database, before = self._opened, (dict[StreamKey, tuple[int, int]](), self._next_stream)
        try:
            if self._go_on(changes):
                with _translated(self.path):
                    self._append(database, [self._row(database, change, before[0]) for change in changes])
                return
            with _translated(self.path), transaction(database):
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
        self._lock.release()

    @property
    def _is_half_saved(self) -> bool:
        """Whether what was saved has to take its place. Without the lock the operator means to begin anew."""
        return bool(self._lock.epoch) and self._saved_file.is_left

    @property
    def _opened(self) -> sqlite3.Connection:
        assert self._database is not None, "it is opened first"
        return self._database

    def _gone(self) -> str | None:
        """Why there must have been a store where there is none; None if there is one, or there never was."""
        wal = Path(f"{self.path}-wal")
        if (self.path.exists() and self.path.stat().st_size) or self._is_half_saved:
            return None
        if not self._lock.epoch and not (wal.exists() and wal.stat().st_size):
            return None
        what = "empty" if self.path.exists() else "gone"
        return (
            f"{self.path} is {what}, though a gateway has kept its sessions there: put it back, or remove "
            f"{self._lock.file} and {wal.name} to begin without them"
        )

    def _connect(self, file: Path, frames: int = 0, saved: Sequence[Change] = ()) -> None:
        """Open the file, whose WAL has had so many frames. Take the lease and write what was `saved`, in one commit."""
        database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        self._database = database
        database.text_factory = text_of
        database.execute("PRAGMA secure_delete = ON")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {self._synchronous}")
        self._schema.check(database)
        found = database.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise CorruptStoreError(found)
        self._look_for_end(database, frames)
        self._schema.migrate(database)
        self._streams.clear()
        self._next_stream = 1 + last_stream(database)
        with transaction(database):
            self._take_lease(database)
            if saved:
                rows = [self._row(database, change, {}) for change in saved]
                database.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)
        database.execute("PRAGMA wal_checkpoint")  # before the lock says that there is a store
        self._lock.note(self._epoch)

    def _take_lease(self, database: sqlite3.Connection) -> None:
        """Take the lease, with the epoch after all that were before. Within a transaction."""
        before, noted = self._epoch_of(database), self._lock.epoch
        if 0 < before < noted:
            self._damage.found("age")
            log.error(
                "the store is older than the one that was there: what was stored since is missing",
                file=str(self.path), epoch=before, epoch_before=noted,
            )  # fmt: skip
        self._epoch = 1 + max(before, noted)
        lease = self._owner, self._epoch, self._version
        database.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, NULL, ?)", lease)
        database.execute("UPDATE streams SET owner = ?, epoch = ?", (self._owner, self._epoch))

    def _look_for_end(self, database: sqlite3.Connection, frames: int) -> None:
        """Say so if the WAL does not have all that was committed to it. What it has is kept for whoever looks at it."""
        _, found, _ = database.execute("PRAGMA wal_checkpoint").fetchone()
        if frames <= max(found, 0):
            return
        self._damage.found("end")
        wal, aside = Path(f"{self.path}-wal"), Path(f"{self._aside()}-wal")
        make_file(aside)
        aside.write_bytes(wal.read_bytes())
        log.error(
            "the end of the store is missing: its write-ahead log is gone, was cut, or was changed",
            file=str(wal), pages=frames, pages_found=found, kept_as=str(aside),
        )  # fmt: skip

    def _save(self, problem: Exception) -> None:
        """Write what can be read of a malformed file to a new one, which takes its place, and keep it aside.

        If the process ends before the new file is whole, the next one finds the malformed file again. Later, `open`
        goes on.
        """
        self._disconnect()
        aside, fresh = self._aside(), self._saved_file.path
        self._damage.found("file")
        log.error(
            "the store is malformed: it is set aside, and what can be read is saved",
            file=str(self.path), kept_as=str(aside), problem=str(problem), hint=f"sqlite3 {aside} .recover",
        )  # fmt: skip
        with _translated(self.path):
            with closing(sqlite3.connect(self.path)) as malformed:
                malformed.text_factory = text_of
                streams = readable_streams(malformed)
            whole = [stream for stream in streams if stream.problem is None]
            self._saved_file.begin()
            self._connect(fresh, saved=[event for stream in whole for event in stream.events])
            self._disconnect()
            self._saved_file.replace(aside)
            self._connect(self.path)
        self._saved_in_part = [stream for stream in streams if stream.problem is not None]
        log.error("streams saved from a malformed store", whole=len(whole), in_part=len(self._saved_in_part))

    def _aside(self) -> Path:
        """The name of what is kept of the file as it is now."""
        return Path(f"{self.path}.corrupt-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")

    def _read(self) -> list[StoredStream]:
        streams = []
        with _translated(self.path):
            for number, key in numbered_streams(self._opened):
                stream = stream_of(self._opened, number, key)
                self._streams[key] = number, len(stream.events)
                streams.append(stream)
        return streams

    def _disconnect(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None

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
            raise StoreError(f"{self.path}: SQLite has written nothing, and says no reason")

    def _row(self, database: sqlite3.Connection, change: Change, before: dict[StreamKey, tuple[int, int]]) -> Row:
        """The row of an event, which begins its stream if there is none."""
        known = self._streams.get(change.stream)
        before.setdefault(change.stream, known or (0, 0))
        if known is None:
            known = self._next_stream, 0
            self._next_stream += 1
            row = (known[0], *change.stream, self._owner, self._epoch)
            database.execute("INSERT INTO streams VALUES (?, ?, ?, ?, ?, ?)", row)
        number, events = known
        self._streams[change.stream] = number, events + 1
        return row_of((number << EVENTS_BITS) + events, change)

    def _delete(self, database: sqlite3.Connection, key: StreamKey, before: dict[StreamKey, tuple[int, int]]) -> None:
        known = self._streams.pop(key, None)
        if known is not None:
            before.setdefault(key, known)
            self._has_deleted = True
            database.execute("DELETE FROM events WHERE event BETWEEN ? AND ?", event_ids(known[0]))
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


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Errors of SQLite and of the system become `StoreError`s."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    except SQLITE_ERRORS as error:
        kind = CorruptStoreError if _is_corrupt(error) else StoreError
        raise kind(f"{path}: {error}") from error


def _is_corrupt(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    is_told = isinstance(error, CorruptStoreError | UnicodeDecodeError)
    return is_told or code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
