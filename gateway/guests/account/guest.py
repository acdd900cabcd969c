"""The guest that keeps accounts: issued keys, what was used, and budgets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily

from plait.gateway.calls.delivery import Delivery
from plait.gateway.config.sections import Config
from plait.gateway.doors import Guest, House
from plait.gateway.guests.account.bill import Bill, cost_of
from plait.gateway.guests.account.books import TABLES, Books, Ledger
from plait.gateway.guests.account.budgets import Budgets, budgets_of
from plait.gateway.guests.account.key_routes import KeyRoutes
from plait.gateway.guests.account.keys import Keys
from plait.gateway.guests.account.prices import Price, prices_of
from plait.gateway.guests.account.usage import Usage
from plait.gateway.guests.account.usage_routes import UsageRoutes
from plait.gateway.guests.receipts.receipts import Receipts
from plait.gateway.tables import TablesError, in_postgresql, in_sqlite


class AccountGuest(Guest):
    """Reads the receipts of ended calls. It goes with calls only where there are prices, budgets or limits of keys."""

    def __init__(self, house: House) -> None:
        kernel, config = house.kernel, house.kernel.config
        self._kernel, self._receipts = kernel, house[Receipts]
        url, file = config.store.url, house.accounts
        self._ledger = ledger = Ledger(Books(in_sqlite(TABLES, file) if url is None else in_postgresql(TABLES, url)))
        self._usage = Usage(ledger, self._receipts, kernel.router, kernel.tenants.stored)
        self._budgets = Budgets(ledger)
        self._keys = Keys(ledger, kernel.keys, kernel.tenants, lambda: kernel.terms.gateways)
        self._prices: dict[str, Price] = {}
        self._has_keys = is_stored = url is not None or config.store.path is not None
        self._keys.on_change = self._changed
        self._take(config)
        kernel.reloading.on_change.append(self._take)
        keys = KeyRoutes(self._keys, ledger, kernel.admin, kernel.bodies, is_stored=is_stored)
        since_s = None if is_stored else time.time()
        usage = UsageRoutes(self._usage, kernel.keys, kernel.admin, kernel.tenants, since_s)
        self.routes = [*keys.routes, *usage.routes]
        if not is_stored:
            kernel.keys.issued = None  # a wrong key is just that

    def start(self) -> None:
        kernel = self._kernel
        kernel.registry.register(self)
        kernel.supervisor.start("accounts", self._usage.keep)
        kernel.supervisor.start("budgets", self._budgets.keep)
        if self._has_keys:
            kernel.supervisor.start("issued-keys", self._keys.keep)

    async def until_ready(self) -> None:
        if self._has_keys:
            await self._keys.look()

    async def stop(self) -> None:
        with suppress(TablesError):
            await self._usage.close()
        await self._budgets.close()
        await self._ledger.close()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """How much of each budget is used, for `/metrics`."""
        used = GaugeMetricFamily(
            "plait_budget_used_ratio", "Part of a budget that is used or reserved", labels=["of", "budget"]
        )
        for purse in self._budgets:
            used.add_metric([purse.budget.of, purse.budget.shown], purse.used_ratio)
        yield used

    def _take(self, config: Config) -> None:
        """Take over the prices and budgets of a configuration."""
        self._prices = prices_of(config.models)
        self._receipts.cost_of = self._cost if self._prices else None
        of_name = self._kernel.tenants.of_name
        self._budgets.of_tenant = {
            of_name(tenant.name): tuple(budgets_of(f"tenant {tenant.name}", tenant.budget))
            for tenant in config.tenants
            if tenant.budget is not None
        }
        self._keys.have(config.tenants)
        self._changed()

    def _changed(self) -> None:
        """Go with calls from now on, if anything asks for it."""
        self._budgets.of_key = self._keys.budgets
        companions = self._kernel.relay.accompany
        is_needed = self._prices or self._budgets.of_tenant or self._budgets.of_key or self._keys.terms
        if is_needed and self._begins not in companions:
            companions.append(self._begins)

    def _begins(self, delivery: Delivery) -> Bill | None:
        asked = delivery.asked
        price, terms = self._prices.get(delivery.call.model), self._keys.terms.get(asked.key)
        purses = self._budgets.purses(asked.tenant, asked.key)
        if price is None and terms is None and not purses:
            return None
        return Bill(delivery, self._kernel.router, price, purses, terms)

    def _cost(self, delivery: Delivery) -> int | None:
        price = self._prices.get(delivery.call.model)
        return None if price is None else cost_of(delivery, price)
