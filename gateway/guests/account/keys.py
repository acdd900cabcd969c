"""Issued keys: their records, and which of them open the gateway now."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from math import inf
from secrets import token_urlsafe
from typing import Final

import msgspec
import structlog

from plait.gateway.admission.tenants import TenantIds, TenantLimits, TenantUse
from plait.gateway.api.auth import IssuedKey, IssuedKeys, KeyRing
from plait.gateway.config.sections import BudgetConfig, TenantConfig
from plait.gateway.guests.account.bill import KeyTerms
from plait.gateway.guests.account.books import Ledger
from plait.gateway.guests.account.budgets import Budget, budgets_of
from plait.gateway.tables import TablesError

EACH_S: Final = 2.0
"""Between two looks at what other gateways have changed."""

KNOWN_S: Final = 600.0
"""For how long keys go on while the store is away."""

SECRET_BYTES: Final = 32

log = structlog.get_logger(__name__)


class KeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is stored of a key besides its digest. Times are in seconds from 1970, limits as in [[tenants]]."""

    id: str
    tenant: str
    shown: str
    """Its first characters."""
    created_at: int
    created_by: str
    name: str = ""
    expires_at: int | None = None
    revoked_at: int | None = None
    models: tuple[str, ...] = ()
    calls_per_s: float | None = None
    tokens_per_s: float | None = None
    budget: BudgetConfig | None = None

    def issued(self, tenant: str) -> IssuedKey:
        """For the key ring, with the identity of its tenant."""
        ends_s = inf if self.expires_at is None else float(self.expires_at)
        return IssuedKey(tenant, self.id, 0.0 if self.revoked_at else ends_s, is_revoked=self.revoked_at is not None)


RECORD: Final = msgspec.json.Decoder(KeyRecord)


def new_key() -> str:
    return IssuedKeys.BEGINS.decode() + token_urlsafe(SECRET_BYTES)


def digest_of(key: str) -> str:
    """What is stored of a key."""
    return sha256(key.encode()).hexdigest()


class Keys:
    """The issued keys as this gateway knows them. `gateways` is among how many the rates of a key are divided.

    `on_change` is called when they have changed.
    """

    def __init__(self, ledger: Ledger, ring: KeyRing, ids: TenantIds, gateways: Callable[[], int]) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.terms: dict[str, KeyTerms] = {}
        self.budgets: dict[str, tuple[Budget, ...]] = {}
        self.tenants: Mapping[str, str] = {}
        """The identities of those that the configuration has now, by name."""
        self._ledger = ledger
        self._ring = ring
        self._ids = ids
        self._gateways = gateways
        self._share = 1
        self._uses: defaultdict[str, TenantUse] = defaultdict(TenantUse)
        self._records: dict[str, KeyRecord] = {}  # by digest
        self._changed = 0
        self._issued = ring.issued = IssuedKeys()

    def have(self, tenants: Iterable[TenantConfig]) -> None:
        """These are the tenants now. The keys of others open nothing."""
        self.tenants = {tenant.name: self._ids.of_name(tenant.name) for tenant in tenants}
        for digest in self._records:
            self._use(digest)

    async def keep(self) -> None:
        """Run for ever, after a first look."""
        while True:
            await asyncio.sleep(EACH_S)
            await self.look()

    async def look(self) -> None:
        """Take over what has changed."""
        try:
            rows = await self._ledger.run(self._ledger.books.keys, self._changed)
        except TablesError:
            self._issued.is_away = True
            return
        self._issued.is_away, self._issued.known_until_s = False, time.time() + KNOWN_S
        changed = [row.digest for row in rows]
        for row in rows:
            self._records[row.digest] = RECORD.decode(row.record)
            self._changed = max(self._changed, row.changed)
            if self._ring.has(bytes.fromhex(row.digest)):
                log.warning("a key is in the configuration, too, which counts", key=self._records[row.digest].id)
        if self._gateways() != self._share:
            self._share, changed = self._gateways(), [*self._records]
        for digest in changed:
            self._use(digest)
        if changed:
            self.on_change()

    def _use(self, digest: str) -> None:
        """Let a key do what its record says."""
        record, place = self._records[digest], bytes.fromhex(digest)
        tenant = self.tenants.get(record.tenant)
        for known in (self.terms, self.budgets):
            known.pop(record.id, None)
        if tenant is None:
            self._issued.pop(place, None)
            return
        self._issued[place] = record.issued(tenant)
        limits = TenantLimits((record.calls_per_s or inf) / self._share, (record.tokens_per_s or inf) / self._share)
        if record.models or limits.has_rates:
            self.terms[record.id] = KeyTerms(frozenset(record.models), limits, self._uses[record.id])
        if record.budget is not None:
            self.budgets[record.id] = tuple(budgets_of(f"key {record.id}", record.budget))

    async def write(self, digest: str, record: KeyRecord) -> None:
        """Store a new record of a key, and use it at once. Raises `AccountsUnavailableError`."""
        await self._ledger.ask(self._ledger.books.put_key, record.id, digest, msgspec.json.encode(record).decode())
        await self.look()
