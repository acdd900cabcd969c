"""The accounts in a database: issued keys, what was used, and what of budgets is leased.

One database for all gateways and workers: PostgreSQL, a file of SQLite, or memory. The statements are the same for all.

What was used
    Each gateway writes its own totals since it has begun its epoch, not what was added, so that nothing is counted
    twice. The totals of a gateway that has written nothing for `SILENT_S` are added to those of the epoch "", and its
    epoch is closed, in one transaction: it then goes on in a new epoch with what it had not written.

What is leased of budgets
    A lease counts as used, so that a budget holds whatever dies. A gateway gives back what it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import gmtime, strftime
from typing import Final, NamedTuple, ParamSpec, TypeVar

from plait.backends.errors import AccountsUnavailableError
from plait.gateway.tables import Database, Tables, TablesError, TablesThread

P = ParamSpec("P")
T = TypeVar("T")

KEPT_DAYS: Final = 400
"""What was used is kept for so long."""

LEASES_KEPT_DAYS: Final = 40
"""A day or month that has begun before is over."""

SILENT_S: Final = 3600.0

DAY_S: Final = 86_400

COUNTS: Final = ("requests", "prompt", "cached", "output", "cost", "engine_us", "estimated")
"""What a row of use counts: calls, tokens, 1e-9 of the currency, microseconds, calls whose tokens are estimated."""

_STATEMENTS: Final = (
    "CREATE TABLE IF NOT EXISTS {}account_changes (one BIGINT PRIMARY KEY, changes BIGINT NOT NULL)",
    "INSERT INTO {}account_changes VALUES (1, 0) ON CONFLICT (one) DO NOTHING",
    """CREATE TABLE IF NOT EXISTS {}account_keys (
        id TEXT PRIMARY KEY, digest TEXT NOT NULL UNIQUE, record TEXT NOT NULL, changed BIGINT NOT NULL,
        used_at BIGINT NOT NULL DEFAULT 0
    )""",
    """CREATE TABLE IF NOT EXISTS {}account_epochs (
        epoch TEXT PRIMARY KEY, number BIGINT NOT NULL, at DOUBLE PRECISION NOT NULL, closed BIGINT NOT NULL
    )""",
    f"""CREATE TABLE IF NOT EXISTS {{}}account_usage (
        epoch TEXT, day BIGINT, tenant TEXT, key TEXT, model TEXT, batch BIGINT,
        {", ".join(f"{count} BIGINT NOT NULL" for count in COUNTS)}, PRIMARY KEY (epoch, day, tenant, key, model, batch)
    )""",
    """CREATE TABLE IF NOT EXISTS {}account_budgets (
        budget TEXT, period TEXT, leased BIGINT NOT NULL, PRIMARY KEY (budget, period)
    )""",
)
TABLES: Final = Tables("account", 1, _STATEMENTS)

_SET: Final = ", ".join(f"{count} = excluded.{count}" for count in COUNTS)
_ADD: Final = ", ".join(f"{count} = known.{count} + excluded.{count}" for count in COUNTS)
_SUMS: Final = ", ".join(f"CAST(sum({count}) AS BIGINT)" for count in COUNTS)
_COLUMNS: Final = f"epoch, day, tenant, key, model, batch, {', '.join(COUNTS)}"


class ClosedEpochError(Exception):
    """The epoch was closed after its write of this `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class UsageKey(NamedTuple):
    """What a row of use is of. `day` counts from 1970, `key` is an id."""

    day: int
    tenant: str
    key: str
    model: str
    batch: bool


Rows = Mapping[UsageKey, Sequence[int]]
"""The counts of each row, in the order of `COUNTS`."""


class StoredKey(NamedTuple):
    """An issued key: its SHA-256 in hexadecimal, its record as JSON, and the number of its change.

    `used_min` is the minute since 1970 in which it was last used; 0: it was not.
    """

    digest: str
    record: str
    changed: int
    used_min: int


class Books:
    """Synchronous; one thread calls all methods. Each raises `TablesError`."""

    def __init__(self, database: Database) -> None:
        self._transaction = database.transaction
        self.close = database.close
        self.interrupt = database.interrupt  # which any thread may call

    # Keys.

    def keys(self, after: int) -> list[StoredKey]:
        """The issued keys with changes after the one of this number, the oldest change first."""
        with self._transaction() as run:
            asked = "SELECT digest, record, changed, used_at FROM {}account_keys WHERE changed > %s ORDER BY changed"
            return [StoredKey(*row) for row in run(asked, after)]

    def key(self, key_id: str) -> StoredKey | None:
        with self._transaction() as run:
            rows = run("SELECT digest, record, changed, used_at FROM {}account_keys WHERE id = %s", key_id)
            return StoredKey(*rows[0]) if rows else None

    def put_key(self, key_id: str, digest: str, record: str) -> None:
        """Write a new key, or another record of one. Changes have numbers in the order of their commits."""
        with self._transaction() as run:
            ((changed,),) = run("UPDATE {}account_changes SET changes = changes + 1 RETURNING changes")
            run(
                "INSERT INTO {}account_keys (id, digest, record, changed) VALUES (%s, %s, %s, %s) "
                "ON CONFLICT (id) DO UPDATE SET record = excluded.record, changed = excluded.changed",
                key_id, digest, record, changed,
            )  # fmt: skip

    # What was used.

    def write(self, epoch: str, number: int, rows: Rows, used_min: Mapping[str, int], now_s: float) -> None:
        """Write the totals of an epoch, and when keys were last used, as the epoch's write of this number.

        Raises `ClosedEpochError` if the epoch was closed.
        """
        with self._transaction() as run:
            found = run("UPDATE {}account_epochs SET at = %s WHERE epoch = %s RETURNING number, closed", now_s, epoch)
            if found and found[0][1]:
                raise ClosedEpochError(found[0][0])
            if found:
                run("UPDATE {}account_epochs SET number = %s WHERE epoch = %s", number, epoch)
            else:
                run("INSERT INTO {}account_epochs VALUES (%s, %s, %s, 0)", epoch, number, now_s)
            marks = ", ".join(["%s"] * (6 + len(COUNTS)))
            for key, counts in rows.items():
                run(
                    f"INSERT INTO {{}}account_usage ({_COLUMNS}) VALUES ({marks}) "  # noqa: S608 - constant
                    f"ON CONFLICT (epoch, day, tenant, key, model, batch) DO UPDATE SET {_SET}",
                    epoch, *key[:-1], int(key.batch), *counts,
                )  # fmt: skip
            for key_id, used in used_min.items():
                run("UPDATE {}account_keys SET used_at = %s WHERE id = %s AND used_at < %s", used, key_id, used)

    def close_epochs(self, now_s: float, own: str | None = None) -> None:
        """Close the epochs that are silent, and `own`. Forget what is too old."""
        with self._transaction() as run:
            silent = run("SELECT epoch FROM {}account_epochs WHERE closed = 0 AND at < %s", now_s - SILENT_S)
            for epoch in {*(epoch for (epoch,) in silent), *([own] if own else [])}:
                run("UPDATE {}account_epochs SET closed = 1 WHERE epoch = %s", epoch)
                columns = _COLUMNS.removeprefix("epoch, ")
                run(
                    f"INSERT INTO {{}}account_usage AS known ({_COLUMNS}) "  # noqa: S608 - constant
                    f"SELECT '', {columns} FROM {{}}account_usage WHERE epoch = %s "
                    f"ON CONFLICT (epoch, day, tenant, key, model, batch) DO UPDATE SET {_ADD}",
                    epoch,
                )
                run("DELETE FROM {}account_usage WHERE epoch = %s", epoch)
            run("DELETE FROM {}account_epochs WHERE closed = 1 AND at < %s", now_s - 30 * DAY_S)
            run("DELETE FROM {}account_usage WHERE day < %s", int(now_s) // DAY_S - KEPT_DAYS)
            begun = strftime("%Y-%m-%d", gmtime(now_s - LEASES_KEPT_DAYS * DAY_S))
            run("DELETE FROM {}account_budgets WHERE period < %s", begun)  # as text, a month is before its days

    def used(self, first_day: int, end_day: int, tenant: str | None = None) -> dict[UsageKey, tuple[int, ...]]:
        """What was used from the first day to before the end, of one tenant or of all."""
        of_tenant, given = ("", ()) if tenant is None else ("AND tenant = %s", (tenant,))
        with self._transaction() as run:
            rows = run(
                f"SELECT day, tenant, key, model, batch, {_SUMS} FROM {{}}account_usage "  # noqa: S608 - constant
                f"WHERE day >= %s AND day < %s {of_tenant} GROUP BY day, tenant, key, model, batch",
                first_day, end_day, *given,
            )  # fmt: skip
        return {
            UsageKey(day, tenant, key, model, bool(batch)): tuple(counts)
            for day, tenant, key, model, batch, *counts in rows
        }

    # Budgets.

    def lease(self, budget: str, period: str, wanted: int, most: int) -> tuple[int, int]:
        """Lease what is left of a budget of `most`, up to `wanted`. A negative amount is given back.

        Returns what is leased more, and what all gateways have leased then.
        """
        with self._transaction() as run:
            ((leased,),) = run(
                "INSERT INTO {}account_budgets AS known VALUES (%s, %s, 0) "
                "ON CONFLICT (budget, period) DO UPDATE SET leased = known.leased RETURNING leased",
                budget, period,
            )  # fmt: skip
            granted = max(-leased, min(wanted, max(0, most - leased)))
            changed = "UPDATE {}account_budgets SET leased = %s WHERE budget = %s AND period = %s"
            run(changed, leased + granted, budget, period)
            return granted, leased + granted


class Ledger:
    """The books in a thread of their own: `run` does work with them in its order. Raises `TablesError`."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self._thread = TablesThread("accounts", books.interrupt)
        self.run = self._thread.run

    async def ask(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, for a client. Raises `AccountsUnavailableError`."""
        try:
            return await self.run(work, *args, **kwargs)
        except TablesError:
            raise AccountsUnavailableError from None

    async def close(self) -> None:
        """Close the database once all work is done."""
        await self._thread.close(self.books.close)
