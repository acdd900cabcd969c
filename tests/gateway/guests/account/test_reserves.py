"""What calls reserve of budgets: together no more than there is, whatever each of them uses."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Final

import pytest

from plait.backends.errors import BudgetExceededError
from plait.backends.protocol.openai import CompletionRequest
from plait.gateway.calls.call import NOWHERE, Answer, Asked, Attempt, Ending
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.outgoing import OutgoingBody
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.guests.account import budgets
from plait.gateway.guests.account.bill import FIRST_TOKENS, Bill
from plait.gateway.guests.account.books import TABLES, Books, Ledger
from plait.gateway.guests.account.budgets import Budget, Purse
from plait.gateway.tables import in_sqlite
from plait.policy.types import Call

PATH: Final = "/v1/completions"
PROMPT: Final = 10
LONGEST: Final = 10 * FIRST_TOKENS
BUDGET: Final = Budget("tenant blue", "tokens", "day", 10 * (PROMPT + LONGEST))


@pytest.fixture
async def purses(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Purse]]:
    """Those of three gateways."""
    monkeypatch.setattr(budgets, "WAIT_S", 0.1)
    ledger = Ledger(Books(in_sqlite(TABLES, None)))
    yield [Purse(BUDGET, ledger) for _ in range(3)]
    await ledger.close()


async def use(purse: Purse, more: asyncio.Event) -> int:
    """What a call uses that is not streamed, and whose answer is as long as it may be."""
    call = Call("r", "m", PROMPT, 64, (), output_limit=LONGEST, streamed=False)
    body = OutgoingBody(b"{}", CompletionRequest(model="m", prompt="x"))
    delivery = Delivery(Asked(call, PATH, (), body, tenant="blue"), call, NOWHERE, None)
    bill = Bill(delivery, Router(), None, (purse,), None)
    try:
        if (waits := bill.enter()) is not None:
            await waits
    except BudgetExceededError:
        bill.undone()
        return 0
    _, sent = bill.sent([], json.dumps({"max_tokens": LONGEST}).encode(), delivery)
    assert isinstance(sent, bytes)
    output: int = json.loads(sent)["max_tokens"]
    await more.wait()
    delivery.attempt = Attempt(None, Answer("ok", usage=CallUsage(PROMPT, output)))  # type: ignore[arg-type]
    delivery.ending = Ending("ok", 200, path=PATH)
    bill.ended(delivery)
    return PROMPT + output


async def test_calls_that_are_not_streamed_exceed_no_budget(purses: list[Purse]) -> None:
    """Also if all of them begin while most of the budget is left."""
    more = asyncio.Event()
    calls = [asyncio.create_task(use(purses[number % 3], more)) for number in range(60)]
    await asyncio.sleep(0.3)
    more.set()
    used = sum(await asyncio.gather(*calls))
    assert BUDGET.most - LONGEST < used <= BUDGET.most
