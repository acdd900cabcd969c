"""Purses of gateways whose database stops in the middle: what it had begun may be done later, and nobody is told.

Against an oracle: no more is used than the budget, but for what calls have used beyond their reserves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.backends.errors import PlaitError
from plait.gateway.guests.account import budgets
from plait.gateway.guests.account.books import TABLES, Books
from plait.gateway.guests.account.budgets import Budget, Budgets
from plait.gateway.tables import TablesError, UncertainError, in_sqlite

GATEWAYS: Final = 3
BUDGET: Final = Budget("tenant blue", "tokens", "day", 1_000)
PASSES: Final = 12
"""Of the event loop after each step, in which all is done that does not wait for the database."""


class Database:
    """The books of all gateways. While they are frozen, work waits until it is done, or is given up."""

    def __init__(self) -> None:
        self.books = Books(in_sqlite(TABLES, None))
        self.leased = 0
        self.is_frozen = False
        self.changes = asyncio.Condition()
        self.late: list[Callable[[], Any]] = []
        """What was given up in the middle of a commit that the database does when it goes on."""

    def lease(self, *args: Any) -> tuple[int, int]:
        granted, self.leased = self.books.lease(*args)
        return granted, self.leased

    async def freeze(self) -> None:
        self.is_frozen = True

    async def thaw(self) -> None:
        self.is_frozen = False
        for work in self.late:
            work()
        self.late.clear()
        async with self.changes:
            self.changes.notify_all()


@dataclass
class DoubtfulLedger:
    """One gateway's: what `run` says of work that was given up is `fate`."""

    database: Database
    fate: str = "lost"
    is_given_up: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def books(self) -> Database:
        return self.database

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        async with self._turn, self.database.changes:
            self.is_given_up = False
            await self.database.changes.wait_for(lambda: self.is_given_up or not self.database.is_frozen)
            if not self.is_given_up:
                return work(*args)
        if self.fate == "refused":
            raise TablesError(self.fate)
        if self.fate == "late":
            self.database.late.append(partial(work, *args))
        raise UncertainError(self.fate)


class Gateway:
    """One gateway's purse, and its calls: the reserves of those that run, and what ended ones have used."""

    def __init__(self, database: Database) -> None:
        self.ledger = DoubtfulLedger(database)
        self.budgets = Budgets(self.ledger)  # type: ignore[arg-type]
        self.budgets.of_tenant = {"blue": (BUDGET,)}
        (self.purse,) = self.budgets.purses("blue", "")
        self.reserves: list[int] = []
        self.used = self.beyond = 0
        self.tasks: set[asyncio.Task[None]] = set()

    def does(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def call(self, amount: int) -> None:
        with suppress(PlaitError):
            self.reserves.append(await self.purse.draw(1 + amount // 4, 1 + amount))

    async def end(self, amount: int) -> None:
        """The oldest call ends: it has used the amount, and at most one token beyond its reserve."""
        if self.reserves:
            reserved = self.reserves.pop(0)
            used = min(amount, reserved + 1)
            self.used += used
            self.beyond += max(0, used - reserved)
            self.purse.put_back(reserved - used)

    async def look(self, _: int) -> None:
        with suppress(TablesError):
            await self.purse.look()

    async def give_up(self, amount: int) -> None:
        async with self.ledger.database.changes:
            self.ledger.fate, self.ledger.is_given_up = ("late", "lost", "refused")[amount % 3], True
            self.ledger.database.changes.notify_all()


STEPS: Final = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "call", "end", "end", "look", "look", "give_up", "freeze", "thaw"]),
        st.integers(0, GATEWAYS - 1),
        st.integers(0, 300),
    ),
    max_size=60,
)


async def hold(steps: list[tuple[str, int, int]]) -> None:
    database = Database()
    gateways = [Gateway(database) for _ in range(GATEWAYS)]
    for step, number, amount in steps:
        if step in {"freeze", "thaw"}:
            await getattr(database, step)()
        else:
            gateways[number].does(getattr(gateways[number], step)(amount))
        for _ in range(PASSES):
            await asyncio.sleep(0)
        check(database, gateways)
    for task in [task for one in gateways for task in one.tasks]:
        task.cancel()


def check(database: Database, gateways: list[Gateway]) -> None:
    used, beyond = sum(one.used for one in gateways), sum(one.beyond for one in gateways)
    held = sum(sum(one.reserves) + one.purse.left for one in gateways)
    assert used + held <= database.leased, "what a gateway uses is leased first"
    assert used <= BUDGET.most + beyond


@settings(max_examples=150, deadline=None)
@example([("call", 0, 0), ("freeze", 0, 0), ("look", 0, 0)])
@given(STEPS)
def test_no_more_is_used_than_the_budget(steps: list[tuple[str, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "WAIT_S", 0.0)
        patch.setattr(budgets, "AGAIN_S", 0.0)
        asyncio.run(hold(steps))
