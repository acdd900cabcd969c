"""Purses: no more is used than a budget has, and what is not used comes back."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from plait.backends.errors import AccountsUnavailableError, BudgetExceededError
from plait.gateway.config.sections import BudgetConfig
from plait.gateway.guests.account import budgets
from plait.gateway.guests.account.books import TABLES, Books, Ledger
from plait.gateway.guests.account.budgets import Budget, Budgets, Purse, budgets_of
from plait.gateway.tables import TablesError, UncertainError, in_sqlite

BUDGET = Budget("tenant blue", "tokens", "day", 100)


@pytest.fixture
async def ledger() -> AsyncIterator[Ledger]:
    made = Ledger(Books(in_sqlite(TABLES, None)))
    yield made
    await made.close()


@pytest.fixture
def purse(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Purse:
    monkeypatch.setattr(budgets, "WAIT_S", 0.1)
    return Purse(BUDGET, ledger)


async def test_a_budget_is_used_up(purse: Purse) -> None:
    assert [await purse.draw(40, 40) for _ in range(2)] == [40, 40]
    assert await purse.draw(10, 40) == 20
    with pytest.raises(BudgetExceededError, match="used up") as error:
        await purse.draw(1, 1)
    assert not error.value.is_reserved
    assert 1 <= (error.value.retry_after_s or 0) <= 86_400
    assert purse.used_ratio == 1.0


async def test_a_call_gets_what_another_gives_back(purse: Purse) -> None:
    assert await purse.draw(100, 100) == 100
    waiting = asyncio.create_task(purse.draw(30, 30))
    await asyncio.sleep(0.01)
    purse.put_back(60)
    assert await waiting == 30
    assert purse.left == 30


async def test_after_a_call_has_waited_in_vain_others_do_not(purse: Purse) -> None:
    await purse.draw(100, 100)
    with pytest.raises(BudgetExceededError):
        await purse.draw(1, 1)
    with pytest.raises(BudgetExceededError):
        async with asyncio.timeout(0.05):
            await purse.draw(1, 1)
    purse.put_back(5)
    assert await purse.draw(1, 1) == 1


async def test_the_error_tells_what_is_only_reserved(purse: Purse) -> None:
    await purse.draw(100, 100)
    purse.reserved = 50
    with pytest.raises(BudgetExceededError, match="reserved by calls that run") as error:
        await purse.draw(1, 1)
    assert error.value.is_reserved
    assert error.value.retry_after_s == 1.0


async def test_what_is_not_needed_is_given_back(purse: Purse, ledger: Ledger) -> None:
    await purse.draw(60, 60)
    purse.put_back(50)
    other = Purse(BUDGET, ledger)
    assert await other.draw(1, 100) == 40
    await purse.look()
    assert 40 <= await other.draw(40, 50) < 50  # an eighth of what was left stays here


@pytest.mark.parametrize(("error", "left"), [(TablesError, 100), (UncertainError, 0)])
async def test_what_others_may_have_already_is_not_used(
    purse: Purse, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, error: type[TablesError], left: int
) -> None:
    """A commit whose answer is lost may have given it back."""

    def fail(*_: object) -> None:
        raise error

    await purse.draw(100, 100)
    purse.put_back(100)
    monkeypatch.setattr(ledger.books, "lease", fail)
    with pytest.raises(TablesError):
        await purse.look(is_last=True)
    assert purse.left == left


async def test_what_was_used_beyond_a_lease_is_counted(purse: Purse, ledger: Ledger) -> None:
    await purse.draw(100, 100)
    purse.put_back(-7)
    await purse.look()
    assert purse.left == 0
    assert await ledger.run(ledger.books.lease, BUDGET.name, purse.period, 0, 100) == (0, 107)


async def test_nothing_is_leased_ahead_that_others_have_leased_meanwhile(purse: Purse, ledger: Ledger) -> None:
    await purse.draw(20, 20)  # 80 are left, as far as this gateway knows
    assert await Purse(BUDGET, ledger).draw(1, 80) == 80
    await purse.look()
    assert purse.left == 0
    assert await ledger.run(ledger.books.lease, BUDGET.name, purse.period, 0, 100) == (0, 100)


async def test_a_client_that_goes_takes_nothing(purse: Purse) -> None:
    await purse.draw(100, 100)
    waiting = asyncio.create_task(purse.draw(30, 30))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.sleep(0)
    purse.put_back(40)
    assert purse.left == 40


async def test_a_purse_stays_while_a_call_has_a_reserve(ledger: Ledger) -> None:
    kept = Budgets(ledger)
    kept.of_tenant = {"blue": (BUDGET,)}
    (purse,) = kept.purses("blue", "")
    await purse.draw(10, 10)
    purse.open += 1
    for _ in range(budgets.IDLE_LOOKS + 2):
        await kept._look()
    assert kept.purses("blue", "") == (purse,)


async def test_a_call_that_fits_is_not_refused_for_a_larger_one(purse: Purse) -> None:
    with pytest.raises(BudgetExceededError):
        await purse.draw(200, 200)
    await purse.look()
    assert await purse.draw(50, 50) == 50


async def test_a_new_day_has_a_new_budget(purse: Purse, monkeypatch: pytest.MonkeyPatch) -> None:
    await purse.draw(100, 100)
    monkeypatch.setattr(time, "time", lambda: datetime(2099, 1, 1, tzinfo=UTC).timestamp())
    assert await purse.draw(100, 100) == 100


async def test_without_the_books_no_more_is_used_than_is_leased(purse: Purse, monkeypatch: pytest.MonkeyPatch) -> None:
    await purse.draw(10, 10)
    purse.put_back(5)

    def away(*_: object) -> tuple[int, int]:
        raise TablesError("away")

    monkeypatch.setattr(Books, "lease", away)
    assert await purse.draw(5, 5) == 5
    with pytest.raises(AccountsUnavailableError):
        await purse.draw(1, 1)


async def test_an_idle_purse_is_forgotten(ledger: Ledger) -> None:
    kept = Budgets(ledger)
    kept.of_tenant = {"blue": (BUDGET,)}
    (purse,) = kept.purses("blue", "")
    assert kept.purses("blue", "") == (purse,)
    await purse.draw(10, 10)
    purse.put_back(10)
    for _ in range(budgets.IDLE_LOOKS + 2):
        await kept.close()
    assert list(kept) == []


def test_the_windows_of_a_budget() -> None:
    noon = datetime(2026, 12, 31, 12, tzinfo=UTC).timestamp()
    day, month = BUDGET, BUDGET._replace(window="month")
    assert (day.period(noon), month.period(noon)) == ("2026-12-31", "2026-12")
    new_year = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert day.ends_s(noon) == month.ends_s(noon) == new_year
    assert month.ends_s(new_year) == datetime(2027, 2, 1, tzinfo=UTC).timestamp()


def test_budgets_of_money_are_whole_numbers() -> None:
    made = list(budgets_of("key k", BudgetConfig(day=0.1, tokens_per_month=7)))
    assert made == [Budget("key k", "cost", "day", 10**8), Budget("key k", "tokens", "month", 7)]
    assert list(budgets_of("key k", None)) == []
