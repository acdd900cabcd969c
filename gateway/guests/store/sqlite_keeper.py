"""An event log in one SQLite file, for one gateway at a time.

The file is in WAL mode. With `synchronous = "normal"`, commits survive any end of the process; with "full", a power cut
too. The lease is a lock on `PATH.lock`. The kernel releases the lock when the process ends, so the next process does
not wait for a lease to run out.

What `open` and `read` do about damage
    The file is gone or empty, but the lock file has an epoch or a WAL exists: refuse to open.
    A later version of Plait or another program has written the file: refuse to open.
    SQLite's integrity check fails: refuse to open, and leave the file as it is.
    The epoch is lower than in the lock file: log it and go on, because the file has a prefix of what was written.
    A stream's checksums fail: return that stream with its problem, and all others as usual.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

import structlog

from plait.gateway.guests.store.damage import Damage
from plait.gateway.guests.store.event_log import CorruptStoreError, LeaseLostError, StoreError, StoreVersionError
from plait.gateway.guests.store.file_place import check_place, make_file, make_folder
from plait.gateway.guests.store.sqlite_schema import MIGRATIONS, Migration, Schema, transaction
from plait.gateway.guests.store.sqlite_streams import (
    EVENTS_BITS,
    SQLITE_ERRORS,
    Row,
    event_ids,
    last_stream,
    numbered_streams,
    row_of,
    stream_of,
    text_of,
)
from plait.gateway.guests.store.store_lock import StoreLock
from plait.gateway.streams import Change, StoredStream, StreamKey

AT_ONCE: Final = 64
"""Up to this many events are one INSERT statement without BEGIN and COMMIT, in four fifths of the time."""

Synchronous = Literal["normal", "full"]

log = structlog.get_logger(__name__)


MAGIC: Final = b"SQLite format 3\0"
"""The first bytes of a database. A file with a WAL may lack them, and a store of ours that is damaged."""


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
        self._streams: dict[StreamKey, tuple[int, int]] = {}  # the stream's number, and the number of its events
        self._next_stream = 1
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
        if self.path.exists() and not self._lock.epoch and not Path(f"{self.path}-wal").exists():
            with self.path.open("rb") as file:
                if file.read(len(MAGIC)) not in {b"", MAGIC}:
                    raise ValueError(f"{self.path} is no SQLite database: name a new file, or put the store back")
        with suppress(StoreError, OSError):  # `open` says what is malformed: the WAL may have what the file lacks
            if self.path.exists() and self.path.stat().st_size:
                uri = f"{self.path.absolute().as_uri()}?immutable=1"  # without it SQLite rebuilds the index of the WAL
                with closing(sqlite3.connect(uri, uri=True)) as database, _translated(self.path):
                    database.text_factory = text_of
                    self._schema.check(database)

    def open(self) -> int:
        """Take the lease and migrate the schema."""
        with _translated(self.path):
            make_folder(self.path)
            self._lock.take()
            gone = self._gone()
            if gone is not None:
                raise StoreError(gone)
            make_file(self.path)
        try:
            with _translated(self.path):
                self._connect()
        except (StoreError, StoreVersionError):
            self._disconnect()
            raise
        return self._epoch

    def read(self) -> Iterator[StoredStream]:
        streams = []
        with _translated(self.path):
            for number, key in numbered_streams(self._opened):
                stream = stream_of(self._opened, number, key)
                self._streams[key] = number, len(stream.events)
                streams.append(stream)
        return iter(streams)

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
    def _opened(self) -> sqlite3.Connection:
        assert self._database is not None, "it is opened first"
        return self._database

    def _gone(self) -> str | None:
        """The error if a store has vanished. None if there is one, or there never was."""
        wal = Path(f"{self.path}-wal")
        if self.path.exists() and self.path.stat().st_size:
            return None
        if not self._lock.epoch and not (wal.exists() and wal.stat().st_size):
            return None
        what = "empty" if self.path.exists() else "gone"
        return (
            f"{self.path} is {what}, though a gateway has kept its sessions there: put it back, or remove "
            f"{self._lock.file} and {wal.name} to begin without them"
        )

    def _connect(self) -> None:
        """Open the file and take the lease."""
        database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._database = database
        database.text_factory = text_of
        database.execute("PRAGMA secure_delete = ON")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {self._synchronous}")
        self._schema.check(database)
        found = database.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise CorruptStoreError(" ".join(found.split()))
        self._schema.migrate(database)
        self._streams.clear()
        self._next_stream = 1 + last_stream(database)
        with transaction(database):
            self._take_lease(database)
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
    except (*SQLITE_ERRORS, CorruptStoreError) as error:
        if not _is_corrupt(error):
            raise StoreError(f"{path}: {error}") from error
        raise CorruptStoreError(
            f"{path} is malformed ({error}) and is left as it is: put a copy back, see what `sqlite3 {path} .recover` "
            f"finds, or move it away with {path}.lock to begin without its sessions"
        ) from error


def _is_corrupt(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    is_told = isinstance(error, CorruptStoreError | UnicodeDecodeError)
    return is_told or code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
