"""An event log in one SQLite file, for one gateway at a time.

The file is in WAL mode. With `synchronous = "normal"`, commits survive any end of the process; with "full", a power cut
too. The lease is a lock on `PATH.lock`. The kernel releases the lock when the process ends, so the next process does
not wait for a lease to run out.

What `open` and `read` do about damage
    The file is gone or empty, but the lock file has an epoch or a WAL exists: refuse to open.
    A later version of Plait or another program has written the file: refuse to open.
    SQLite's integrity check fails: set the file aside, and write what can be read of it to a new file.
    The WAL is shorter than its index says, or the epoch is lower than in the lock file: log it and go on, because the
        file still has a prefix of what was written.
    A stream's checksums fail: return that stream with its problem, and all others as usual.
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
"""Up to this many events are one INSERT statement without BEGIN and COMMIT, in four fifths of the time."""

Synchronous = Literal["normal", "full"]

log = structlog.get_logger(__name__)


class SqliteKeeper:
    """Stores a log in the file `path`. `owner` is a name for the lease, the same for all gateways that use the file.

    `version` is the latest version of events that this release can read.
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
        self._streams: dict[StreamKey, tuple[int, int]] = {}  # the stream's number, and the number of its events
        self._next_stream = 1
        self._saved_in_part: list[StoredStream] = []  # streams of a malformed file that lack events
        self._has_deleted = False
        self._database: sqlite3.Connection | None = None

    def __repr__(self) -> str:
        return f"SqliteKeeper({str(self.path)!r}, epoch={self._epoch})"

    def check(self) -> None:
        """Raise ValueError if the file cannot be there, has vanished, or was written by a later version."""
        check_place(self.path)
        gone = self._gone()
        if gone is not None:
            raise ValueError(gone)
        with suppress(*SQLITE_ERRORS, CorruptStoreError, OSError):  # `open` handles a malformed file
            if self.path.exists() and self.path.stat().st_size:
                uri = f"{self.path.absolute().as_uri()}?immutable=1"  # without it SQLite rebuilds the index of the WAL
                with closing(sqlite3.connect(uri, uri=True)) as database:
                    database.text_factory = text_of
                    self._schema.check(database)

    def open(self) -> int:
        """Take the lease and migrate the schema. Replaces a malformed file by what can be read of it."""
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
        frames = committed_frames(self.path)  # before SQLite opens the file, which rebuilds the index
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
        """Checkpoint and truncate the WAL, which still has deleted values."""
        if self._has_deleted and self._database is not None:
            with suppress(sqlite3.Error):
                busy, *_ = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                self._has_deleted = bool(busy)

    def close(self) -> None:
        """Close the file, which checkpoints it, and release the lease."""
        self._disconnect()
        self._lock.release()

    @property
    def _is_half_saved(self) -> bool:
        """Whether a crash has interrupted the replacement of a malformed file.

        Without an epoch in the lock file, the operator has removed it to begin with an empty store.
        """
        return bool(self._lock.epoch) and self._saved_file.is_left

    @property
    def _opened(self) -> sqlite3.Connection:
        assert self._database is not None, "it is opened first"
        return self._database

    def _gone(self) -> str | None:
        """The error if a store has vanished. None if there is one, or there never was."""
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
        """Open the file, whose WAL must have `frames`. Takes the lease and writes `saved` events in one commit."""
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
        database.execute("PRAGMA wal_checkpoint")  # first: from `note` on, an empty file counts as a lost store
        self._lock.note(self._epoch)

    def _take_lease(self, database: sqlite3.Connection) -> None:
        """Take the lease with a new highest epoch, within a transaction."""
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
        """Log it if the WAL lacks commits, and keep a copy of the WAL for an operator."""
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
        """Replace a malformed file by a new one with what can be read of it, and keep the malformed file aside.

        After a crash before the new file is whole, the next process begins again; after a later crash, its `open`
        finishes the replacement.
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
        """The name for a copy of the present file."""
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
        """Whether the changes only append a few events to known streams, so that one INSERT is enough."""
        is_few = 0 < len(changes) <= AT_ONCE
        return is_few and all(change.data is not None and change.stream in self._streams for change in changes)

    def _append(self, database: sqlite3.Connection, rows: Sequence[tuple[object, ...]]) -> None:
        """Insert the rows. The same statement checks the lease."""
        values = [value for row in rows for value in row]
        if not database.execute(_appending(len(rows)), (*values, self._owner, self._epoch)).rowcount:
            self._check_lease(database)
            raise StoreError(f"{self.path}: SQLite has written nothing, and says no reason")

    def _row(self, database: sqlite3.Connection, change: Change, before: dict[StreamKey, tuple[int, int]]) -> Row:
        """The row of an event. Creates its stream if necessary. `before` collects the state that `_undo` restores."""
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
        """Restore the streams in memory, because the transaction was rolled back."""
        for key, known in before.items():
            if known == (0, 0):
                self._streams.pop(key, None)
            else:
                self._streams[key] = known
        self._next_stream = next_stream


@cache
def _appending(events: int) -> str:
    """The statement that inserts so many events if the owner's lease has the epoch."""
    rows = ", ".join(["(?, ?, ?, ?, ?)"] * events)
    lease = "(SELECT epoch FROM leases WHERE owner = ?) = ?"
    return f"INSERT INTO events SELECT * FROM (VALUES {rows}) WHERE {lease}"  # noqa: S608 - question marks


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the system into `StoreError`s."""
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
