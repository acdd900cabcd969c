"""Gateways one after another over the same store, each of which ends as a killed process does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from plait.gateway.guests.durability.durability import Durability
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
from plait.gateway.streams import Change
from tests.gateway.guests.programs.chained_gateway import Exchange, Served, settle
from tests.invariants import check
from tests.waiting import WITHIN_S


class DurableServed(Served):
    """A gateway with a store. Each request waits for it, unless `waits` is False."""

    waits = False

    async def send(
        self, path: str, body: Any = None, *, key: str = "one", method: str = "POST", **headers: str
    ) -> Exchange:
        exchange = await super().send(path, body, key=key, method=method, **headers)
        if self.waits:
            await self.stored()
        return exchange

    @property
    def durability(self) -> Durability:
        assert self.gateway.house[Durability] is not None
        return self.gateway.house[Durability]

    async def recover(self) -> None:
        """Read the store, and start what was interrupted."""
        chained = self.gateway.house[ChainedCalls]
        async with asyncio.timeout(WITHIN_S):
            await self.durability.recover(
                chained.runner, self.gateway.house[StoredResponses], self.gateway.kernel.router
            )
        await self.stored()
        self.waits = True

    async def stored(self) -> None:
        """All that has happened is in the store, and who waited for that was told."""
        log = self.durability.log
        await settle()
        while log.backlog_bytes or log._waiters:
            await asyncio.sleep(0.001)
            await settle()
        await settle()  # a commit may have ended in the last step, and who waited for it goes on after that

    async def kill(self) -> None:
        """The end of the process: nothing more is written, and the lease is free."""
        await self.stored()
        self.durability.freeze()
        for exchange in self.exchanges:
            exchange.task.cancel()
        await self.gateway.house[ChainedCalls].close()
        await self.durability.close()
        await settle()


def keeper_of(served: DurableServed) -> SqliteKeeper:
    """The keeper of its store."""
    keeper = served.durability.log._keeper
    assert isinstance(keeper, SqliteKeeper)
    return keeper


@contextmanager
def held_commits(served: DurableServed) -> Iterator[None]:
    """Nothing is committed in the block."""
    keeper, may_go_on = keeper_of(served), threading.Event()
    write = keeper.write

    def held(changes: Sequence[Change], *, again: bool = False) -> None:
        assert may_go_on.wait(10)
        write(changes, again=again)

    served.waits = False
    keeper.write = held  # type: ignore[method-assign]
    try:
        yield
    finally:
        may_go_on.set()
        served.waits = True
        keeper.write = write  # type: ignore[method-assign]


@asynccontextmanager
async def durable(path: Path, **sessions: Any) -> AsyncIterator[DurableServed]:
    """The next gateway over the store; it is killed at the end."""
    served = DurableServed(path, **sessions)
    await served.recover()
    yield served
    check(served.executor)
    await served.kill()
