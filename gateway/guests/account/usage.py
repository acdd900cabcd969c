"""What tenants and keys have used: read from the receipts of ended calls once a second, and written as totals."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from secrets import token_hex
from typing import Final

from plait.backends.errors import AccountsUnavailableError
from plait.gateway.fleet.router import Router
from plait.gateway.guests.account.books import COUNTS, DAY_S, ClosedEpochError, Ledger, UsageKey
from plait.gateway.guests.account.prices import used_by
from plait.gateway.guests.receipts.receipt import Receipt
from plait.gateway.guests.receipts.receipts import DECODER, Receipts
from plait.gateway.tables import TablesError

EACH_S: Final = 1.0
"""Between two looks at the receipts, each of which writes what has changed."""

AT_ONCE: Final = 500
"""So many receipts are read between two turns of the event loop."""

TIDY_S: Final = 3600.0

Totals = dict[UsageKey, tuple[int, ...]]


class Usage:
    """The totals of this process's epoch. `name` turns a tenant's identity into what is stored of it."""

    def __init__(self, ledger: Ledger, receipts: Receipts, router: Router, name: Callable[[str], str]) -> None:
        self._ledger = ledger
        self._router = router
        self._name = name
        self._told: list[bytes] = []
        receipts.told = self._told
        self._totals: dict[UsageKey, list[int]] = defaultdict(lambda: [0] * len(COUNTS))
        self._used_min: dict[str, int] = {}
        self._changed: set[UsageKey] = set()
        self._keys_used: set[str] = set()
        self._epoch = token_hex(8)
        self._number = 0
        self._confirmed: Totals = {}
        self._in_doubt: dict[int, Totals] = {}  # by their numbers: the writes whose fate is not known
        self._writing = asyncio.Lock()

    async def keep(self) -> None:
        """Run for ever."""
        tidied_s = 0.0
        while True:
            await asyncio.sleep(EACH_S)
            try:
                await self.write()
                if time.monotonic() - tidied_s > TIDY_S:
                    tidied_s = time.monotonic()
                    await self._ledger.run(self._ledger.books.close_epochs, time.time())
            except TablesError:
                continue  # the ledger has said so; the totals are written with the next ones

    async def close(self) -> None:
        """Write what is left, and close the epoch."""
        await self.write()
        await self._ledger.run(self._ledger.books.close_epochs, time.time(), self._epoch)

    async def of(self, first_day: int, end_day: int, tenant: str | None) -> Totals:
        """As `Books.used`, with what was used just now. Raises `AccountsUnavailableError`."""
        try:
            await self.write()
            return await self._ledger.run(self._ledger.books.used, first_day, end_day, tenant)
        except TablesError:
            raise AccountsUnavailableError from None

    async def write(self) -> None:
        """Read the receipts, and write the totals that have changed. Raises `TablesError`."""
        await self._read()
        if not self._changed and not self._keys_used:
            return
        async with self._writing:
            try:
                await self._write()
            except ClosedEpochError as closed:
                self._begin_anew(closed.number)
                await self._write()

    async def _read(self) -> None:
        while self._told:
            part, self._told[:AT_ONCE] = self._told[:AT_ONCE], []
            for encoded in part:
                self._add(DECODER.decode(encoded))
            if self._told:
                await asyncio.sleep(0)

    def _add(self, receipt: Receipt) -> None:
        used = used_by(receipt.path, receipt.outcome, receipt.prompt_tokens, receipt.passed_tokens, receipt.usage)
        if used is None:
            return
        ended_s, engine = receipt.at + receipt.e2e_s, self._router.engines.get(receipt.choices[-1].engine)
        engine_s = 0.0
        if engine is not None:
            costs = engine.view.cost_model
            engine_s = costs.prefill_time_s(used.prompt - used.cached, used.cached)
            engine_s += costs.decode_time_s(used.output, used.prompt)
        row = UsageKey(int(ended_s) // DAY_S, self._name(receipt.tenant), receipt.key, receipt.model, receipt.is_line)
        counts = self._totals[row]
        for place, more in enumerate(
            (1, used.prompt, used.cached, used.output, receipt.cost or 0, round(engine_s * 1e6), int(used.is_estimated))
        ):
            counts[place] += more
        self._changed.add(row)
        minute = int(ended_s) // 60
        if receipt.key and self._used_min.get(receipt.key, 0) < minute:
            self._used_min[receipt.key] = minute
            self._keys_used.add(receipt.key)

    async def _write(self) -> None:
        self._number += 1
        self._in_doubt[self._number] = rows = {row: tuple(self._totals[row]) for row in self._changed}
        used_min = {key: self._used_min[key] for key in self._keys_used}
        await self._ledger.run(self._ledger.books.write, self._epoch, self._number, rows, used_min, time.time())
        self._confirmed |= rows
        self._in_doubt.clear()
        self._changed -= {row for row, counts in rows.items() if tuple(self._totals[row]) == counts}
        self._keys_used -= {key for key, minute in used_min.items() if self._used_min[key] == minute}
        self._forget()

    def _begin_anew(self, number: int) -> None:
        """The epoch was closed after its write of this number: go on with what that does not have."""
        written = self._confirmed
        for one, rows in self._in_doubt.items():
            written |= rows if one <= number else {}
        for row, counts in written.items():
            self._totals[row] = [total - one for total, one in zip(self._totals[row], counts, strict=True)]
        self._changed = {row for row, counts in self._totals.items() if any(counts)}
        self._epoch, self._number, self._confirmed, self._in_doubt = token_hex(8), 0, {}, {}

    def _forget(self) -> None:
        """Drop the totals of days before yesterday, which change no more."""
        first = int(time.time()) // DAY_S - 1
        for row in [row for row in self._confirmed if row.day < first and row not in self._changed]:
            del self._confirmed[row]
            self._totals.pop(row, None)
