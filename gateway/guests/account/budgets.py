"""Budgets of tenants and keys: each gateway leases from the books what its calls reserve, and some more.

A lease counts as used. It is what the waiting calls need, and what calls reserve in about a second, or an eighth of
what is left, if that is less: so near the end of a budget nothing lies unused in a gateway. A call that finds nothing
left waits for up to `WAIT_S` for what other calls and gateways give back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

import structlog

from plait.backends.errors import AccountsUnavailableError, BudgetExceededError, ReachedLimit
from plait.gateway.config.sections import BudgetConfig
from plait.gateway.guests.account.books import DAY_S, Ledger
from plait.gateway.guests.account.prices import UNIT
from plait.gateway.tables import TablesError, UncertainError
from plait.gateway.timer import loop_time_s

WAIT_S: Final = 1.0
AGAIN_S: Final = 0.05
"""Between two looks for what others have given back."""

EACH_S: Final = 0.25
"""Between two looks at what this gateway may give back."""

IDLE_LOOKS: Final = 8
"""A lease without a call is given back after as many."""

WARNS_AT: Final = 0.8

UNBOUNDED: Final = 2**62

log = structlog.get_logger(__name__)

Unit = Literal["cost", "tokens"]
Window = Literal["day", "month"]
WINDOWS: Final[tuple[Window, ...]] = ("day", "month")


class Budget(NamedTuple):
    """One budget: of whom, of what, for how long, and how much. A cost is in 1e-9 of the currency."""

    of: str
    """`tenant NAME` or `key ID`."""
    unit: Unit
    window: Window
    most: int

    @property
    def name(self) -> str:
        """In the books."""
        return f"{self.of} {self.unit}"

    @property
    def shown(self) -> str:
        """In the configuration."""
        return self.window if self.unit == "cost" else f"tokens_per_{self.window}"

    def period(self, now_s: float) -> str:
        """The day or the month in UTC."""
        return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d" if self.window == "day" else "%Y-%m")

    def ends_s(self, now_s: float) -> float:
        """When the present day or month ends, in seconds from 1970."""
        if self.window == "day":
            return (now_s // DAY_S + 1) * DAY_S
        now = datetime.fromtimestamp(now_s, UTC)
        return datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC).timestamp()


def budgets_of(of: str, config: BudgetConfig | None) -> Iterator[Budget]:
    """The budgets of a tenant or a key, named as in `Budget.of`."""
    if config is None:
        return
    for window in WINDOWS:
        money, tokens = getattr(config, window), getattr(config, f"tokens_per_{window}")
        if money is not None:
            yield Budget(of, "cost", window, round(money * UNIT))
        if tokens is not None:
            yield Budget(of, "tokens", window, tokens)


@dataclass(slots=True, eq=False)
class Purse:
    """What this gateway has leased of one budget, for the present day or month. `left` is neither used nor reserved.

    `rest` is what was not leased by anybody after the latest lease; None: not known.
    """

    budget: Budget
    ledger: Ledger
    period: str = ""
    left: int = 0
    rest: int | None = None
    open: int = 0
    """How many reserves calls have here."""
    reserved: int = 0
    """What calls have reserved beyond what each needs: they may leave most of it."""
    per_s: float = 0.0
    """How much calls have reserved of late."""
    has_warned: bool = False
    _taken: int = 0
    _idle: int = 0  # looks since a call has last taken something
    _wanted: int = 0  # what the calls want that wait
    _asks: asyncio.Task[bool] | None = None  # for all that wait
    _empty_until_s: float = 0.0  # a call has just waited in vain

    @property
    def free(self) -> int:
        """What a call could get, as far as this gateway knows."""
        return self.left + (self.rest or 0)

    def renew(self) -> None:
        """Begin a new day or month. What runs since before counts for the old one."""
        period = self.budget.period(time.time())
        if period != self.period:
            self.period, self.left, self.rest, self.has_warned = period, 0, None, False

    def has(self, amount: int) -> bool:
        """Whether so much is leased here."""
        self.renew()
        return self.left >= amount

    def take(self, least: int, most: int) -> int | None:
        """Reserve up to `most` of what is leased here. Returns how much; None: not even `least` is there."""
        self.renew()
        self._idle = 0
        if self.left < least or (self.left < most and self.rest != 0):
            return None
        amount = min(most, self.left)
        self.left -= amount
        self._taken += amount
        return amount

    async def draw(self, least: int, most: int, *, waits: bool = True) -> int:
        """Reserve up to `most`, and lease more for it. Returns how much.

        Raises `BudgetExceededError` if `least` is not there, also within `WAIT_S` for a call that `waits`, and
        `AccountsUnavailableError` while the books do not answer.
        """
        until_s = loop_time_s() + (WAIT_S if waits else 0.0)
        self._wanted += most
        try:
            while (taken := self.take(least, most)) is None:
                if loop_time_s() < self._empty_until_s and self.free < least:
                    raise self.exceeded(least)
                if self._asks is None:
                    self._asks = asyncio.create_task(self._ask(), name="budget")
                if not await asyncio.shield(self._asks):
                    raise AccountsUnavailableError
                if self.left < least and loop_time_s() >= until_s:
                    self._empty_until_s = loop_time_s() + WAIT_S
                    raise self.exceeded(least)
        finally:
            self._wanted -= most
        return taken

    def put_back(self, amount: int) -> None:
        """Give back what was reserved and not used. A negative amount was used beyond it."""
        self.left += amount
        self._empty_until_s = 0.0

    def exceeded(self, needed: int) -> BudgetExceededError:
        """The error of a call that needs as much."""
        budget, now_s = self.budget, time.time()
        whose = "tenant" if budget.of.startswith("tenant ") else "API key"
        scale = UNIT if budget.unit == "cost" else 1
        reached = ReachedLimit(f"budget.{budget.shown}", budget.most / scale, (budget.most - self.free) / scale)
        if self.reserved >= needed:
            said = f"The rest of this {whose}'s budget ({budget.shown}) is reserved by calls that run."
            return BudgetExceededError(said, retry_after_s=1.0, reached=reached, is_reserved=True)
        said = f"This {whose}'s budget of {budget.most / scale:g} ({budget.shown}) is used up."
        return BudgetExceededError(said, retry_after_s=max(1.0, budget.ends_s(now_s) - now_s), reached=reached)

    async def _ask(self) -> bool:
        """Lease for the calls that wait, after a while if all was leased. Returns whether the books have answered."""
        try:
            if self.rest == 0:
                await asyncio.sleep(AGAIN_S)
            await self._lease(max(0, self._wanted - self.left) + self._ahead())
        except TablesError:
            return False
        finally:
            self._asks = None
        return True

    def _ahead(self) -> int:
        return int(min(self.per_s, (self.rest or 0) / 8))

    async def _lease(self, amount: int, *, is_used: bool = False) -> None:
        """Lease up to an amount, also beyond the budget if it `is_used` already. A negative one was given back.

        What is leased is there once the books have said so, and not before: in doubt, nobody has it.
        """
        budget, period = self.budget, self.period
        most = UNBOUNDED if is_used else budget.most
        granted, leased = await self.ledger.run(self.ledger.books.lease, budget.name, period, amount, most)
        if period != self.period:
            return  # a new day has begun meanwhile
        self.left += max(0, granted)
        self.rest = max(0, budget.most - leased)
        if not self.has_warned and budget.most - self.free >= WARNS_AT * budget.most:
            self.has_warned = True
            log.warning("a budget is nearly used up", budget=f"{budget.of} {budget.shown}", used=self.used_ratio)

    @property
    def used_ratio(self) -> float:
        """The part of the budget that is used or reserved."""
        return round((self.budget.most - self.free) / self.budget.most, 4)

    async def look(self, *, is_last: bool = False) -> bool:
        """Give back what is not needed. Returns False once the purse is empty and unused. Raises `TablesError`."""
        self.per_s, self._taken = (self.per_s + self._taken / EACH_S) / 2, 0
        self._idle += 1
        self.renew()
        kept = 0 if is_last or self._idle > IDLE_LOOKS else self._ahead()
        if self._asks is None and self.left < 0:
            await self._lease(-self.left, is_used=True)
        elif self._asks is None and self.left > 2 * kept:
            await self._give_back(self.left - kept)
        return self._idle <= IDLE_LOOKS or bool(self.left or self.open or self._asks)

    async def _give_back(self, amount: int) -> None:
        """Give back a part of what is left. In doubt, others have it."""
        period = self.period
        self.left -= amount
        try:
            await self._lease(-amount)
        except TablesError as error:
            if period == self.period and not isinstance(error, UncertainError):
                self.left += amount
            raise


@dataclass(slots=True, eq=False)
class Reserve:
    """What one call has reserved in a purse. Most calls leave what is beyond `needs`; None: this one leaves nothing."""

    purse: Purse
    needs: int | None
    _amount: int = 0
    _beyond: int = 0
    _before: int = 0  # of a day or month that has ended, for which it counts
    _period: str = ""

    def __post_init__(self) -> None:
        self.purse.open += 1

    def add(self, amount: int) -> None:
        """The call has taken so much from the purse."""
        if self._period != self.purse.period:
            self._period, self._before, self._amount = self.purse.period, self._before + self._amount, 0
        self._amount += amount
        beyond = 0 if self.needs is None else max(0, amount - self.needs)
        self._beyond += beyond
        self.purse.reserved += beyond

    def settle(self, used: int) -> None:
        """The call has ended, and has used so much: give the rest back."""
        if self._period == self.purse.period:
            self.purse.put_back(min(self._amount, self._before + self._amount - used))
        self.purse.open -= 1
        self.purse.reserved -= self._beyond


class Budgets:
    """The purses of one gateway. `of_key` and `of_tenant` have the budgets by key id and by the tenant's identity."""

    def __init__(self, ledger: Ledger) -> None:
        self.of_key: Mapping[str, tuple[Budget, ...]] = {}
        self.of_tenant: Mapping[str, tuple[Budget, ...]] = {}
        self._ledger = ledger
        self._purses: dict[tuple[str, str], Purse] = {}

    def purses(self, tenant: str, key: str) -> tuple[Purse, ...]:
        """Those from which a call of a tenant by a key takes."""
        return tuple(map(self._purse, (*self.of_tenant.get(tenant, ()), *self.of_key.get(key, ()))))

    def _purse(self, budget: Budget) -> Purse:
        name = budget.name, budget.window
        purse = self._purses.get(name)
        if purse is None:
            purse = self._purses[name] = Purse(budget, self._ledger)
        purse.budget = budget  # its amount may have changed
        return purse

    async def keep(self) -> None:
        """Run for ever."""
        while True:
            await asyncio.sleep(EACH_S)
            await self._look()

    async def close(self) -> None:
        """Give back all that is left."""
        await self._look(is_last=True)

    async def _look(self, *, is_last: bool = False) -> None:
        for name, purse in list(self._purses.items()):
            try:
                is_used = await purse.look(is_last=is_last)
            except TablesError:
                return
            if not is_used:
                self._purses.pop(name, None)

    def __iter__(self) -> Iterator[Purse]:
        return iter(self._purses.values())
