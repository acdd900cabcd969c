"""Files, batches and the answers of lines in a database.

The contents of a file are rows of 128 KiB. A batch has one gateway, which renews its lease: each write of a batch is
of its owner only, so that one that was given up writes nothing. An answer is a row until the batch has ended; then all
of them become a file, in the order of the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, takewhile
from typing import Final, NamedTuple

import msgspec

from plait.gateway.guests.batches.batch import ACTIVE, Batch
from plait.gateway.tables import Database, Run, Tables

PART_BYTES: Final = 2**17
"""Of a row with contents."""
DELETED_AT_ONCE: Final = 32
"""Parts of a file."""
LEASE_S: Final = 6.0
UPLOAD_S: Final = 300
"""A file that does not come as a whole, and is not renewed by its gateway for so long, goes."""
DAY_S: Final = 86_400
KEPT_S: Final = 31 * DAY_S
"""Batches that have ended stay for a day longer than the longest that their files may."""

LAST_ID: Final = "batch_u"
"""An id behind those of all batches: they are in the order of time, as `id_at` makes them."""

MOST_KEPT_BATCHES: Final = 10_000
"""The most batches of a tenant that stay once they have ended."""

MOST_ANSWERS, MOST_BYTES = 500, 2**23
"""Bounds on the answers that are read or written at once: a write has 5 s, and each of its answers is a round trip."""

_ACTIVE: Final = "', '".join(ACTIVE)
_IS_ACTIVE: Final = f"(status IN ('{_ACTIVE}'))"
"""A condition on a batch. Without values, since only then the index of those few batches is used."""

_CLEARED: Final = "'cleared'"
"""The owner of a batch that has ended while its answers are deleted, a few at a time: 1.5 GB would take ten seconds."""

TABLES: Final = Tables(
    "batches",
    1,
    (
        """CREATE TABLE IF NOT EXISTS {}batches_files (
            id TEXT PRIMARY KEY, tenant TEXT NOT NULL, record TEXT NOT NULL, bytes BIGINT NOT NULL,
            expires_at BIGINT, whole BIGINT NOT NULL
        )""",
        "CREATE TABLE IF NOT EXISTS {}batches_parts (file TEXT, part BIGINT, data BYTEA, PRIMARY KEY (file, part))",
        """CREATE TABLE IF NOT EXISTS {}batches_batches (
            id TEXT PRIMARY KEY, tenant TEXT NOT NULL, record TEXT NOT NULL, status TEXT NOT NULL,
            owner TEXT NOT NULL, until DOUBLE PRECISION NOT NULL, cancels BIGINT NOT NULL DEFAULT 0
        )""",
        """CREATE TABLE IF NOT EXISTS {}batches_answers (
            batch TEXT, line BIGINT, failed BIGINT NOT NULL, data BYTEA NOT NULL, PRIMARY KEY (batch, line)
        )""",
        f"CREATE INDEX IF NOT EXISTS batches_active ON {{}}batches_batches (tenant) WHERE {_IS_ACTIVE}",
        "CREATE INDEX IF NOT EXISTS batches_by_id ON {}batches_batches (tenant, id)",
        f"CREATE INDEX IF NOT EXISTS batches_cleared ON {{}}batches_batches (id) WHERE owner = {_CLEARED}",
        "CREATE INDEX IF NOT EXISTS batches_files_of_tenant ON {}batches_files (tenant)",
        "CREATE INDEX IF NOT EXISTS batches_files_old ON {}batches_files (expires_at)",
    ),
)


class FileRecord(msgspec.Struct, frozen=True):
    """A file as OpenAI's API describes it. Times are in seconds from 1970."""

    id: str
    filename: str
    purpose: str
    created_at: int
    expires_at: int | None = None
    bytes: int = 0


class LineAnswer(NamedTuple):
    """What a line has come to: a line of the output, or of the errors."""

    line: int
    failed: bool
    data: bytes
    used: tuple[int, int, int, int] = (0, 0, 0, 0)
    """As in `Batch.usage`. Not stored."""


def id_at(now_s: float) -> str:
    """The least id of a batch that is made at this time. Ids of before had digits up to f, and are less."""
    return f"batch_t{int(now_s * 1e3):012x}"


def at_once(sizes: Iterable[int]) -> int:
    """How many answers of these sizes are read or written at once: at least one."""
    sums = accumulate(islice(sizes, MOST_ANSWERS))
    return sum(1 for _ in takewhile(MOST_BYTES.__ge__, sums)) or 1


class FileInUseError(Exception):
    """A batch that has not ended reads the file."""


class NotOwnerError(Exception):
    """Another gateway has the batch, or it has ended, or is gone."""


_FILE: Final = msgspec.json.Decoder(FileRecord)
_BATCH: Final = msgspec.json.Decoder(Batch)


class Desk:
    """Synchronous; one thread calls all methods. Each raises `TablesError`. `tenant` is what is stored of one.

    Files and answers leave room on the disk: without it, what writes them raises `DiskFullError`.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._transaction = database.transaction
        self._check_room = database.check_room
        self.close = database.close

    # Files.

    def put_part(self, file_id: str, part: int, data: bytes) -> None:
        self._check_room()
        with self._transaction() as run:
            _put_part(run, file_id, part, data)

    def begin_file(self, tenant: str, file_id: str, most_bytes: int, now_s: float) -> tuple[int, int]:
        """A file of so many bytes at most comes, and is to be renewed until it is whole.

        Returns what the tenant has then, as `held`. Where two come at the same time, at least one counts the other.
        """
        self._check_room()
        with self._transaction() as run:
            asked = "INSERT INTO {}batches_files VALUES (%s, %s, '', %s, %s, 0)"
            run(asked, file_id, tenant, most_bytes, int(now_s) + UPLOAD_S)
        return self.held(tenant)

    def renew_file(self, file_id: str, now_s: float) -> bool:
        """A file still comes. Returns whether it is there."""
        with self._transaction() as run:
            asked = "UPDATE {}batches_files SET expires_at = %s WHERE id = %s AND whole = 0 AND expires_at > 0 "
            return bool(run(asked + "RETURNING id", int(now_s) + UPLOAD_S, file_id))

    def put_file(self, tenant: str, record: FileRecord, last: Sequence[tuple[int, bytes]] = ()) -> None:
        """Make a file whole, with its `last` parts."""
        with self._transaction() as run:
            for part, data in last:
                _put_part(run, record.id, part, data)
            _put_file(run, tenant, record)

    def drop(self, file_id: str) -> None:
        """Let a file go that has not become whole."""
        with self._transaction() as run:
            run("UPDATE {}batches_files SET expires_at = 0 WHERE id = %s AND whole = 0", file_id)

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        with self._transaction() as run:
            asked = "SELECT record FROM {}batches_files WHERE id = %s AND tenant = %s AND whole = 1"
            rows = run(asked, file_id, tenant)
        return _FILE.decode(rows[0][0]) if rows else None

    def files(self, tenant: str) -> list[FileRecord]:
        with self._transaction() as run:
            rows = run("SELECT record FROM {}batches_files WHERE tenant = %s AND whole = 1", tenant)
        return [_FILE.decode(record) for (record,) in rows]

    def held(self, tenant: str) -> tuple[int, int]:
        """How many files a tenant has, and their bytes; one that still comes has as many as it may."""
        asked = "SELECT count(*), CAST(coalesce(sum(bytes), 0) AS BIGINT) FROM {}batches_files WHERE "
        with self._transaction() as run:
            ((count, size),) = run(asked + "tenant = %s AND coalesce(expires_at, 1) > 0", tenant)
        return count, size

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Let a file go. Returns whether it was there. Raises `FileInUseError` while a batch reads it."""
        with self._transaction() as run:
            asked = "UPDATE {}batches_files SET whole = 0, expires_at = 0 WHERE id = %s AND tenant = %s AND whole = 1 "
            if not run(asked + "RETURNING id", file_id, tenant):
                return False
            if file_id in _inputs(run):
                raise FileInUseError(file_id)
        return True

    def expire(self, now_s: float) -> bool:
        """Delete some parts of a file whose time is over and that no batch reads. Returns whether there was one.

        A whole file would take seconds, and others work in between. Before, answers go that a gateway has left, and
        after the last, batches that ended long ago.
        """
        with self._transaction() as run:
            if left := run(f"SELECT id FROM {{}}batches_batches WHERE owner = {_CLEARED} LIMIT 1"):  # noqa: S608 - constant
                _clear(run, left[0][0])
                return True
            old = {file_id for (file_id,) in run("SELECT id FROM {}batches_files WHERE expires_at < %s", int(now_s))}
            file_id = min(old - _inputs(run), default=None)
            if file_id is None:
                ended = f"DELETE FROM {{}}batches_batches WHERE until < %s AND NOT {_IS_ACTIVE}"  # noqa: S608
                run(ended, now_s - KEPT_S)
                return False
            gone = "UPDATE {}batches_files SET whole = 0, expires_at = 0 WHERE id = %s AND expires_at > 0 RETURNING id"
            if run(gone, file_id):
                return True  # a batch that was made of it at this moment is seen before its parts go
            asked = "SELECT part FROM {}batches_parts WHERE file = %s ORDER BY part DESC LIMIT %s"
            if parts := run(asked, file_id, DELETED_AT_ONCE):
                run("DELETE FROM {}batches_parts WHERE file = %s AND part >= %s", file_id, parts[-1][0])
            else:
                run("DELETE FROM {}batches_files WHERE id = %s", file_id)
        return True

    def part(self, file_id: str, part: int) -> bytes:
        """A row of a file; empty behind its end."""
        with self._transaction() as run:
            rows = run("SELECT data FROM {}batches_parts WHERE file = %s AND part = %s", file_id, part)
        return bytes(rows[0][0]) if rows else b""

    def read(self, file_id: str, begin: int, end: int) -> bytes:
        """The bytes of a range that is in a file; fewer if the file is deleted meanwhile."""
        asked, found = "SELECT substr(data, %s, %s) FROM {}batches_parts WHERE file = %s AND part = %s", bytearray()
        with self._transaction() as run:
            while begin < end:
                part, at = divmod(begin, PART_BYTES)
                size = min(end - begin, PART_BYTES - at)
                for (data,) in run(asked, at + 1, size, file_id, part):
                    found += data
                begin += size
        return bytes(found)

    # Batches.

    def add(self, batch: Batch, most: int) -> bool | None:
        """Add a batch. False, with nothing done, if its tenant has `most` that have not ended; None: it has no file.

        If the tenant has more than `MOST_KEPT_BATCHES`, its oldest ones that have ended are deleted.
        """
        with self._transaction() as run:
            whole = "UPDATE {}batches_files SET whole = 1 WHERE id = %s AND tenant = %s AND whole = 1 RETURNING id"
            if not run(whole, batch.input_file_id, batch.tenant):  # an update: nobody deletes the file meanwhile
                return None
            asked = f"SELECT count(*) FROM {{}}batches_batches WHERE tenant = %s AND {_IS_ACTIVE}"  # noqa: S608
            ((count,),) = run(asked, batch.tenant)
            if count < most:
                record = msgspec.json.encode(batch).decode()
                added = "INSERT INTO {}batches_batches (id, tenant, record, status, owner, until) VALUES "
                run(added + "(%s, %s, %s, %s, '', 0)", batch.id, batch.tenant, record, batch.status)
                oldest = "SELECT id FROM {}batches_batches WHERE tenant = %s ORDER BY id DESC LIMIT 1 OFFSET %s"
                gone = f"DELETE FROM {{}}batches_batches WHERE tenant = %s AND NOT {_IS_ACTIVE} AND id < ({oldest})"  # noqa: S608
                run(gone, batch.tenant, batch.tenant, MOST_KEPT_BATCHES - 1)
        return bool(count < most)

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        with self._transaction() as run:
            rows = run("SELECT record, cancels FROM {}batches_batches WHERE id = %s AND tenant = %s", batch_id, tenant)
        return _as_asked(*rows[0]) if rows else None

    def batches(self, tenant: str, most: int, before: str = LAST_ID, since: str = "") -> list[Batch]:
        """At most so many batches of a tenant with ids in this range, the latest first."""
        asked = "SELECT record, cancels FROM {}batches_batches WHERE tenant = %s AND id < %s AND id >= %s "
        with self._transaction() as run:
            rows = run(asked + "ORDER BY id DESC LIMIT %s", tenant, before, since, most)
        return [_as_asked(record, cancels) for record, cancels in rows]

    def cancel(self, tenant: str, batch_id: str, now: int) -> None:
        """Tell the batch's gateway that it is cancelled."""
        with self._transaction() as run:
            asked = "UPDATE {}batches_batches SET cancels = %s WHERE id = %s AND tenant = %s AND cancels = 0"
            run(asked, now, batch_id, tenant)

    def claim(self, owner: str, now_s: float) -> None:
        """Become the owner of the batches that have none, or whose owner is silent."""
        with self._transaction() as run:
            run(
                f"UPDATE {{}}batches_batches SET owner = %s, until = %s WHERE until < %s AND {_IS_ACTIVE}",  # noqa: S608
                owner, now_s + LEASE_S, now_s,
            )  # fmt: skip

    def renew(self, owner: str, now_s: float) -> list[tuple[Batch, bool]]:
        """Renew the leases. Returns the batches of this owner that have not ended, and whether each is cancelled."""
        with self._transaction() as run:
            rows = run(
                f"UPDATE {{}}batches_batches SET until = %s "  # noqa: S608 - constant
                f"WHERE owner = %s AND {_IS_ACTIVE} RETURNING record, cancels",
                now_s + LEASE_S, owner,
            )  # fmt: skip
        return [(_BATCH.decode(record), bool(cancels)) for record, cancels in rows]

    def release(self, owner: str) -> None:
        """Let other gateways go on with all batches of this owner."""
        with self._transaction() as run:
            own = f"owner = %s AND {_IS_ACTIVE}"
            run(f"UPDATE {{}}batches_batches SET owner = '', until = 0 WHERE {own}", owner)  # noqa: S608

    def save(self, owner: str, batch: Batch, answers: Sequence[LineAnswer] = ()) -> None:
        """Write the answers of lines and the batch, as it is with them. Raises `NotOwnerError`."""
        if answers:
            self._check_room()
        with self._transaction() as run:
            _save(run, owner, batch)
            for answer in answers:
                asked = "INSERT INTO {}batches_answers VALUES (%s, %s, %s, %s) ON CONFLICT (batch, line) DO NOTHING"
                run(asked, batch.id, answer.line, int(answer.failed), answer.data)

    def answered(self, batch_id: str) -> list[tuple[int, bool]]:
        """The lines that have an answer, and whether each has failed."""
        with self._transaction() as run:
            rows = run("SELECT line, failed FROM {}batches_answers WHERE batch = %s", batch_id)
        return [(line, bool(failed)) for line, failed in rows]

    def answers(self, batch_id: str, after: int, *, failed: bool) -> list[LineAnswer]:
        """The next answers behind a line that have failed, or the others, in order: as many as are read at once."""
        asked = "SELECT line, {} FROM {{}}batches_answers WHERE batch = %s AND failed = %s AND line > %s ORDER BY line "
        values = batch_id, int(failed), after
        with self._transaction() as run:
            sizes = run(asked.format("length(data)") + "LIMIT %s", *values, MOST_ANSWERS)
            found = run(asked.format("data") + "LIMIT %s", *values, at_once(size for _, size in sizes))
        return [LineAnswer(line, failed, bytes(data)) for line, data in found]

    def end(self, owner: str, batch: Batch, files: Iterable[FileRecord]) -> None:
        """End a batch with the files of its answers. Raises `NotOwnerError`."""
        with self._transaction() as run:
            _save(run, owner, batch)
            for record in files:
                _put_file(run, batch.tenant, record)
            run(f"UPDATE {{}}batches_batches SET owner = {_CLEARED} WHERE id = %s", batch.id)  # noqa: S608 - constant

    def clear(self, batch_id: str) -> bool:
        """Delete some answers of a batch that has ended. Returns whether there were any."""
        with self._transaction() as run:
            return _clear(run, batch_id)


def _clear(run: Run, batch_id: str) -> bool:
    asked = "SELECT line, length(data) FROM {}batches_answers WHERE batch = %s ORDER BY line DESC LIMIT %s"
    if found := run(asked, batch_id, MOST_ANSWERS):
        last = found[at_once(size for _, size in found) - 1][0]
        run("DELETE FROM {}batches_answers WHERE batch = %s AND line >= %s", batch_id, last)
    else:
        run("UPDATE {}batches_batches SET owner = '' WHERE id = %s", batch_id)
    return bool(found)


def _as_asked(record: str, cancels: int) -> Batch:
    """A batch, which is cancelled from the time at which a client has asked for it."""
    batch = _BATCH.decode(record)
    return batch.entered("cancelling", cancels) if cancels and batch.status in {"validating", "in_progress"} else batch


def _inputs(run: Run) -> set[str]:
    """The files that batches read which have not ended."""
    rows = run(f"SELECT record FROM {{}}batches_batches WHERE {_IS_ACTIVE}")  # noqa: S608 - constant
    return {_BATCH.decode(record).input_file_id for (record,) in rows}


def _save(run: Run, owner: str, batch: Batch) -> None:
    asked = "UPDATE {}batches_batches SET record = %s, status = %s WHERE id = %s AND owner = %s AND "
    if not run(f"{asked}{_IS_ACTIVE} RETURNING id", msgspec.json.encode(batch).decode(), batch.status, batch.id, owner):
        raise NotOwnerError(batch.id)


def _put_part(run: Run, file_id: str, part: int, data: bytes) -> None:
    asked = (
        "INSERT INTO {}batches_parts VALUES (%s, %s, %s) ON CONFLICT (file, part) DO UPDATE SET data = excluded.data"
    )
    run(asked, file_id, part, data)


def _put_file(run: Run, tenant: str, record: FileRecord) -> None:
    run(
        "INSERT INTO {}batches_files VALUES (%s, %s, %s, %s, %s, 1) ON CONFLICT (id) DO UPDATE SET "
        "record = excluded.record, bytes = excluded.bytes, expires_at = excluded.expires_at, whole = 1",
        record.id, tenant, msgspec.json.encode(record).decode(), record.bytes, record.expires_at,
    )  # fmt: skip
