"""An event log in PostgreSQL, which several gateways share.

Each gateway has a row with a unique epoch and a lease, which runs out by the database's clock unless it is renewed. A
stream names the epoch of its owner. Fencing: to give a dead gateway up, another one deletes its row first, and each
transaction that writes events or takes streams begins with an update of its own row. So a gateway that was given up and
wakes later can write nothing.

A pooler gives each transaction any session of the database. So no setting or lock, and there no prepared statement, is
left by one.

After an outage of the database, all leases are over at once. So a gateway gives others up only after it has held its
own lease for `LEASE_S` without a gap: by then, all living gateways have renewed theirs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from math import inf
from typing import Any, Final

import psycopg
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from plait.gateway.admission.rate_leases import Drawn
from plait.gateway.admission.shares import Need, fair_parts
from plait.gateway.guests.store.event_log import (
    LEASE_S,
    Claims,
    HeldElsewhereError,
    LeaseLostError,
    Member,
    RefusedDataError,
    SignRow,
    StoreError,
    StoreVersionError,
    drawn,
)
from plait.gateway.guests.store.postgres_schema import MIGRATIONS
from plait.gateway.streams import Change, StoredStream, StreamKey

SLICE: Final = 256
"""The most streams taken over at once, so that all living gateways get some."""

WAITS: Final[dict[str, Any]] = {
    "connect_timeout": 3,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 5_000,
}
"""Connection options."""

_TRANSACTION: Final = """
    BEGIN; SET LOCAL idle_in_transaction_session_timeout = '2s'; SET LOCAL lock_timeout = '2s';
    SET LOCAL statement_timeout = '10s'
"""
"""One message. If a gateway is stopped (SIGSTOP) in a transaction, the database ends its session and locks."""

BEYOND_LIMITS: Final = "54"
"""The SQLSTATE class of data beyond a limit, such as an index row above 2,704 bytes."""

MIGRATION_LOCK: Final = 0x706C6974
SHARE_LOCK: Final = MIGRATION_LOCK + 1

_ENTER: Final = """
    INSERT INTO plait.gateways (epoch, url, release, until, steady_since, commits)
    VALUES (nextval('plait.epochs'), %s, %s, now() + make_interval(secs => %s), now(), 0) RETURNING epoch
"""

_HOLD: Final = """
    UPDATE plait.gateways AS own SET
        commits = %s, until = now() + make_interval(secs => %s), signature = %s,
        steady_since = CASE WHEN until < now() THEN now() ELSE steady_since END
    FROM (SELECT commits FROM plait.gateways WHERE epoch = %s FOR NO KEY UPDATE) AS before
    WHERE epoch = %s RETURNING before.commits
"""
"""Renews the lease. Begins each transaction that writes events or takes streams. No row: the gateway was given up."""

_LAPSED: Final = """
    SELECT epoch FROM plait.gateways WHERE until < now() AND EXISTS (
        SELECT FROM plait.gateways WHERE epoch = %s AND steady_since < now() - make_interval(secs => %s)
    ) FOR UPDATE SKIP LOCKED
"""

_TAKE_SOME: Final = """
    UPDATE plait.streams SET owner = %s WHERE stream IN (
        SELECT stream FROM plait.streams WHERE owner IS NULL AND version <= %s AND kind <> %s
        ORDER BY stream LIMIT %s FOR UPDATE SKIP LOCKED
    ) RETURNING stream, kind, tenant, name
"""

_TAKE_ALL: Final = """
    UPDATE plait.streams SET owner = %s WHERE owner IS NULL AND version <= %s AND kind = %s
    RETURNING stream, kind, tenant, name
"""

_ADOPT: Final = """
    UPDATE plait.streams AS known SET owner = %s
    FROM unnest(%s::text[], %s::text[]) AS given (tenant, name)
    WHERE known.tenant = given.tenant AND known.name = given.name AND kind IN (%s, %s)
        AND owner IS NULL AND version <= %s
    RETURNING stream, kind, known.tenant, known.name
"""

_CLAIM: Final = """
    INSERT INTO plait.streams (kind, tenant, name, owner, version)
    SELECT %s, tenant, name, %s, %s FROM unnest(%s::text[], %s::text[]) AS given (tenant, name)
    WHERE NOT EXISTS (
        SELECT FROM plait.streams AS known
        WHERE known.tenant = given.tenant AND known.name = given.name AND kind IN (%s, %s)
    ) ON CONFLICT DO NOTHING RETURNING stream, kind, tenant, name
"""

_OWNERS: Final = """
    SELECT tenant, name, coalesce(owner, 0) FROM plait.streams
    JOIN unnest(%s::text[], %s::text[]) AS given (tenant, name) USING (tenant, name) WHERE kind IN (%s, %s)
"""

_BEGIN: Final = """
    INSERT INTO plait.streams AS known (kind, tenant, name, owner, version)
    SELECT kind, tenant, name, %s, %s FROM unnest(%s::text[], %s::text[], %s::text[]) AS given (kind, tenant, name)
    ON CONFLICT (tenant, name, kind) DO UPDATE SET owner = EXCLUDED.owner WHERE known.owner = EXCLUDED.owner
    RETURNING stream, kind, tenant, name
"""

_BUCKET: Final = """
    INSERT INTO plait.buckets AS known VALUES (%s, %s, clock_timestamp())
    ON CONFLICT (bucket) DO UPDATE SET used = known.used
    RETURNING used, greatest(0, extract(epoch FROM clock_timestamp() - at))::float8
"""

_WRITE: Final = """
    INSERT INTO plait.events (stream, version, at_unix_s, data)
    SELECT * FROM unnest(%b::bigint[], %b::smallint[], %b::float8[], %b::bytea[])
"""


def _unsigned(_epoch: int, _url: str, _release: str) -> str:
    """For tools, to which other gateways send nothing."""
    return ""


class PostgresKeeper:
    """Stores a log in the database at `url`, for the gateway that others reach at `advertise_url`.

    The password comes from libpq's own places, such as PGPASSWORD. Streams of the kind `whole` refer to each other, so
    one gateway takes all of them over. `version` is the latest version of events that this release can read. Raises
    ValueError for an unusable URL.
    """

    def __init__(
        self, url: str, advertise_url: str, *, release: str, version: int, whole: str = "", sign: SignRow = _unsigned
    ) -> None:
        self._place = place_of(url)
        self._url = url
        self._advertise_url = advertise_url
        self._release = release
        self._version = version
        self._whole = whole
        self._sign = sign
        self.epoch = 0
        self._commits = 0
        """The number of the last commit that was tried."""
        self._streams: dict[StreamKey, int] = {}
        self._database: Connection[TupleRow] | None = None

    def __repr__(self) -> str:
        return f"PostgresKeeper({self._place!r}, epoch={self.epoch})"

    def check(self) -> None:
        """Does nothing: a database that is out of reach now may come back."""

    def open(self) -> int:
        """Take a lease with a new epoch. The streams of earlier processes at this address lose their owner."""
        self._streams.clear()
        with self._transaction() as database:
            self._migrate(database)
        with self._transaction() as database:
            namesakes = "SELECT epoch, until < now() FROM plait.gateways WHERE url = %s FOR UPDATE"
            for epoch, is_over in database.execute(namesakes, (self._advertise_url,)).fetchall():
                if self.epoch and not is_over:  # this process had a lease before, so the live row is not its own
                    raise HeldElsewhereError(f"another gateway has the advertise_url {self._advertise_url}, too")
                self._give_up(database, [epoch])
            entered = database.execute(_ENTER, (self._advertise_url, self._release, LEASE_S)).fetchall()
            signed = "UPDATE plait.gateways SET signature = %s WHERE epoch = %s"
            database.execute(signed, (self._signature(entered[0][0]), entered[0][0]))
        self.epoch, self._commits = int(entered[0][0]), 0
        return self.epoch

    def read(self) -> Iterator[StoredStream]:
        """Take over all streams without an owner, slice by slice."""
        while streams := self.take_over():
            yield from streams

    def stream(self, key: StreamKey) -> StoredStream:
        number = self._streams.get(key)
        if number is None:
            return StoredStream(key, [])
        with self._transaction() as database:
            return self._with_events(database, [(number, *key)])[0]

    def tidy(self) -> None:
        """Does nothing: the database vacuums."""

    def write(self, changes: Sequence[Change], *, again: bool = False) -> None:
        """Write the changes in one transaction, without those of streams that another gateway owns."""
        events, ended = _final(changes)
        begun = dict[StreamKey, int]()
        if not again:
            self._commits += 1  # even if this fails: a number stands for one set of changes
        with self._transaction() as database:
            if self._hold(database, self._commits):
                self._delete(database, ended, events.keys())
                begun = self._begun(database, [key for key in events if key not in self._streams])
                self._insert(database, begun, events)
        self._streams.update(begun)
        for key in ended - events.keys():
            self._streams.pop(key, None)

    def renew(self) -> list[Member]:
        """Renew the lease, and give up the gateways whose leases have run out."""
        with self._transaction() as database:
            self._hold(database, self._commits)
            lapsed = database.execute(_LAPSED, (self.epoch, LEASE_S)).fetchall()
            self._give_up(database, [epoch for (epoch,) in lapsed])
            members = "SELECT epoch, url, release, until < now(), signature FROM plait.gateways ORDER BY epoch"
            return [Member(*row) for row in database.execute(members).fetchall()]

    def claim(self, streams: Sequence[StreamKey], *, instead: str, begin: bool = True) -> Claims:
        kind = streams[0].kind
        asked = [key.tenant for key in streams], [key.name for key in streams], kind, instead
        with self._transaction() as database:
            self._hold(database, self._commits)
            adopted = database.execute(_ADOPT, (self.epoch, *asked, self._version)).fetchall()
            begun = database.execute(_CLAIM, (kind, self.epoch, self._version, *asked)).fetchall() if begin else []
            owners = database.execute(_OWNERS, asked).fetchall()
            found = self._with_events(database, adopted)
        self._know(begun + adopted)
        return Claims({StreamKey(kind, tenant, name): owner for tenant, name, owner in owners}, found)

    def owner(self, stream: StreamKey) -> int | None:
        asked = "SELECT coalesce(owner, 0) FROM plait.streams WHERE tenant = %s AND name = %s AND kind = %s"
        with self._transaction() as database:
            row = database.execute(asked, (stream.tenant, stream.name, stream.kind)).fetchone()
        return None if row is None else int(row[0])

    def take_over(self) -> list[StoredStream]:
        """Become the owner of up to `SLICE` streams without one, and of all of the kind `whole`."""
        with self._transaction() as database:
            self._hold(database, self._commits)
            asked = self.epoch, self._version, self._whole
            rows = database.execute(_TAKE_SOME, (*asked, SLICE)).fetchall()
            rows += database.execute(_TAKE_ALL, asked).fetchall()
            found = self._with_events(database, rows)
        self._know(rows)
        return found

    def release(self, streams: Sequence[StreamKey]) -> None:
        numbers = [number for key in streams if (number := self._streams.pop(key, None)) is not None]
        with self._transaction() as database:
            database.execute(
                "UPDATE plait.streams SET owner = NULL WHERE stream = ANY(%s) AND owner = %s", (numbers, self.epoch)
            )

    def draw(
        self, bucket: str, rates: Sequence[float], least: Sequence[float], most: Sequence[float], *, burst_s: float
    ) -> Drawn:
        """Draw from a bucket by the database's clock. A crash of the database empties all buckets (UNLOGGED)."""
        with self._transaction() as database:
            ((before, elapsed_s),) = database.execute(_BUCKET, (bucket, [0.0] * len(rates))).fetchall()
            left = [
                0.0 if rate == inf else max(0.0, used - rate * elapsed_s)
                for used, rate in zip(before, rates, strict=True)
            ]
            result = drawn(left, rates, least, most, burst_s=burst_s)
            kept = [0.0 if rate == inf else used for used, rate in zip(result.used, rates, strict=True)]
            emptied = "UPDATE plait.buckets SET used = %s, at = clock_timestamp() WHERE bucket = %s"
            database.execute(emptied, (kept, bucket))
        return result

    def share(self, needs: Mapping[str, Need]) -> Mapping[str, int]:
        """Compute this gateway's parts, one gateway at a time. A dead gateway's part stays reserved until its row goes.

        A gateway that waits for the lock has locked no row but its own, so no other gateway waits for it.
        """
        others = "SELECT until >= now(), epoch, needs, parts FROM plait.gateways WHERE epoch <> %s ORDER BY epoch"
        told = "UPDATE plait.gateways SET needs = %s, parts = %s WHERE epoch = %s"
        with self._transaction() as database:
            self._hold(database, self._commits)
            database.execute("SELECT pg_advisory_xact_lock(%s)", (SHARE_LOCK,))
            rows = database.execute(others, (self.epoch,)).fetchall()
            parts = {name: self._part(name, need, rows) for name, need in needs.items()}
            wanted = {name: need.wanted for name, need in needs.items()}
            database.execute(told, (Jsonb(wanted), Jsonb(parts), self.epoch))
        return parts

    def close(self) -> None:
        """Release the lease and all streams."""
        if self._database is not None and self.epoch:
            with suppress(StoreError), self._transaction() as database:
                self._give_up(database, [self.epoch])
        self._disconnect()

    def _part(self, name: str, need: Need, others: Iterable[TupleRow]) -> int:
        """The fair part, or less if the others' present parts do not leave it."""
        wanted, used = {self.epoch: need.wanted}, 0
        for is_live, epoch, wants, has in others:
            used += has.get(name, 0)
            if is_live and name in wants:
                wanted[epoch] = wants[name]
        epochs = sorted(wanted)
        fair = fair_parts(need.whole, [wanted[epoch] for epoch in epochs])[epochs.index(self.epoch)]
        return max(0, min(fair, need.whole - used))

    # The methods below run within a transaction.

    def _hold(self, database: Connection[TupleRow], number: int) -> bool:
        """Renew the lease, sign the row, and store the number of the commit.

        False if this commit was made already, and the connection broke before the reply came.
        """
        asked = number, LEASE_S, self._signature(self.epoch), self.epoch, self.epoch
        row = database.execute(_HOLD, asked).fetchone()
        if row is None:
            raise LeaseLostError(f"other gateways have given this one up (epoch {self.epoch}): its lease was over")
        return int(row[0]) < number

    def _signature(self, epoch: int) -> str:
        return self._sign(epoch, self._advertise_url, self._release)

    def _give_up(self, database: Connection[TupleRow], epochs: Sequence[int]) -> None:
        """Delete the rows of dead gateways, then free their streams.

        The deletion waits for a last transaction of such a gateway, so that its streams are freed, too.
        """
        if epochs:
            database.execute("DELETE FROM plait.gateways WHERE epoch = ANY(%s)", (list(epochs),))
            database.execute("UPDATE plait.streams SET owner = NULL WHERE owner = ANY(%s)", (list(epochs),))

    def _begun(self, database: Connection[TupleRow], keys: Sequence[StreamKey]) -> dict[StreamKey, int]:
        """Create streams, except for those that another gateway owns. Returns their numbers."""
        if not keys:
            return {}
        rows = database.execute(_BEGIN, (self.epoch, self._version, *map(list, zip(*keys, strict=True)))).fetchall()
        return {StreamKey(*key): stream for stream, *key in rows}

    def _delete(self, database: Connection[TupleRow], ended: Iterable[StreamKey], again: Container[StreamKey]) -> None:
        """Delete the events of streams that have ended, and the streams themselves unless they begin `again`."""
        gone = [known for key in ended if (known := self._streams.get(key)) is not None]
        if gone:
            database.execute("DELETE FROM plait.events WHERE stream = ANY(%s)", (gone,))
        over = [known for key in ended if key not in again and (known := self._streams.get(key)) is not None]
        if over:
            database.execute("DELETE FROM plait.streams WHERE stream = ANY(%s)", (over,))

    def _insert(
        self, database: Connection[TupleRow], begun: Mapping[StreamKey, int], events: Mapping[StreamKey, list[Change]]
    ) -> None:
        numbers = ((key, begun.get(key) or self._streams.get(key)) for key in events)
        rows = [
            (number, change.version, change.at_unix_s, change.data)
            for key, number in numbers
            if number is not None
            for change in events[key]
        ]
        if rows:
            database.execute(_WRITE, tuple(map(list, zip(*rows, strict=True))))

    def _with_events(self, database: Connection[TupleRow], rows: Sequence[TupleRow]) -> list[StoredStream]:
        """The streams with their events, the oldest first."""
        keys = {number: StreamKey(kind, tenant, name) for number, kind, tenant, name in sorted(rows)}
        if not keys:
            return []
        found = database.execute(
            "SELECT stream, version, at_unix_s, data FROM plait.events WHERE stream = ANY(%s) ORDER BY stream, event",
            (list(keys),),
            binary=True,
        ).fetchall()
        events = {
            stream: [Change(keys[stream], at_unix_s, bytes(data), version) for _, version, at_unix_s, data in run]
            for stream, run in groupby(found, lambda row: int(row[0]))
        }
        return [StoredStream(key, events.get(number, [])) for number, key in keys.items()]

    def _know(self, rows: Sequence[TupleRow]) -> None:
        self._streams.update({StreamKey(*key): stream for stream, *key in rows})

    def _migrate(self, database: Connection[TupleRow]) -> None:
        """Migrate the schema, one gateway at a time."""
        database.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
        if database.execute("SELECT to_regclass('plait.schema')").fetchone() == (None,):
            database.execute("CREATE SCHEMA IF NOT EXISTS plait")
            database.execute("CREATE TABLE plait.schema (version INTEGER NOT NULL)")
            database.execute("INSERT INTO plait.schema VALUES (0)")
        ((version,),) = database.execute("SELECT version FROM plait.schema").fetchall()
        if version > len(MIGRATIONS):
            raise StoreVersionError(
                f"{self._place} was written by a later version of Plait (schema {version}, this one knows "
                f"{len(MIGRATIONS)}): use that version, or another database"
            )
        for migration in MIGRATIONS[version:]:
            database.execute(migration)
        database.execute("UPDATE plait.schema SET version = %s", (len(MIGRATIONS),))

    # The connection.

    @contextmanager
    def _transaction(self) -> Iterator[Connection[TupleRow]]:
        """Not psycopg's own, which sends BEGIN alone: the timeouts would take one more round trip."""
        with self._translated():
            database = self._connected()
            database.execute(_TRANSACTION)
            try:
                yield database
                database.commit()
            finally:
                with suppress(psycopg.Error):
                    database.rollback()  # sends nothing after a commit

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn PostgreSQL's errors into `StoreError`s. After any but a data error, a new connection is made."""
        try:
            yield
        except (psycopg.Error, UnicodeEncodeError) as error:
            problem = f"{self._place}: {' '.join(str(error).split())}"
            if _is_of_data(error):
                raise RefusedDataError(problem) from error
            self._disconnect()
            raise StoreError(problem) from error

    def _connected(self) -> Connection[TupleRow]:
        if self._database is None:
            self._database = psycopg.connect(self._url, autocommit=True, **WAITS)
            if self._database.execute("SELECT pg_backend_pid()").fetchone() != (self._database.info.backend_pid,):
                self._database.prepare_threshold = None  # a pooler; without one, commits would take 0.2 ms more
        return self._database

    def _disconnect(self) -> None:
        if self._database is not None:
            with suppress(psycopg.Error):
                self._database.close()
            self._database = None


def place_of(url: str) -> str:
    """Host, port and database of a URL. Raises ValueError if it is invalid or has a password."""
    try:
        parts: dict[str, Any] = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise ValueError("store.url: expected postgresql://USER@HOST:PORT/DATABASE") from None  # not shown: a password
    if parts.get("password"):
        raise ValueError("store.url holds a password: expected a url without it; PGPASSWORD in the environment has it")
    return f"{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"


def _is_of_data(error: Exception) -> bool:
    """Whether the data itself is refused: SQLSTATE class 22 (`DataError`) or 54 (limits), or an encoding.

    psycopg refuses a NUL itself, Python a lone surrogate.
    """
    if isinstance(error, psycopg.DataError | UnicodeEncodeError):
        return True
    return isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith(BEYOND_LIMITS)


def _final(changes: Iterable[Change]) -> tuple[dict[StreamKey, list[Change]], set[StreamKey]]:
    """The net effect of the changes: the remaining events by stream, and the streams that have ended."""
    events, ended = dict[StreamKey, list[Change]](), set[StreamKey]()
    for change in changes:
        if change.data is None:
            events.pop(change.stream, None)
            ended.add(change.stream)
        else:
            events.setdefault(change.stream, []).append(change)
    return events, ended
