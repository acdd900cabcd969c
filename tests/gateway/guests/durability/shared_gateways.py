"""Gateways that share a store, which is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from plait.gateway.guests.peers import membership
from plait.gateway.guests.store import group_commit, jobs, postgres_keeper
from tests.gateway.guests.durability.durable_gateway import DurableServed
from tests.gateway.guests.peers.shared_memory import MemoryKeeper, SharedMemory
from tests.gateway.guests.programs.chained_gateway import KEYS
from tests.invariants import check


def shared_memory(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    """What all gateways of a test share, in place of a database."""
    for module, name in ((group_commit, "RETRY_S"), (jobs, "REGULAR_S"), (membership, "TAKE_OVER_S")):
        monkeypatch.setattr(module, name, 0.001)
    memory = SharedMemory()
    monkeypatch.setattr(
        postgres_keeper, "PostgresKeeper", lambda _url, own, *, sign, **_: MemoryKeeper(memory, own, sign)
    )
    return memory


class SharedServed(DurableServed):
    """A gateway that takes over what no other has while `keeping` runs."""

    keeping: asyncio.Task[None]

    async def hang(self) -> None:
        """It does nothing more: it does not even notice that the others have given it up."""
        self.keeping.cancel()
        self.durability.log.jobs.regular = None
        self.durability.freeze()
        await self.durability.log.run(lambda: None)  # behind what its store's thread had begun


@asynccontextmanager
async def gateway(name: str, **sessions: Any) -> AsyncIterator[SharedServed]:
    """One that takes over what nobody has."""
    server = {"api_keys": KEYS, "advertise_url": f"http://{name}", "peer_key": "p" * 32, "secret": "s" * 32}
    served = SharedServed(None, {"server": server, "store": {"url": "postgresql://plait@db/plait"}}, **sessions)
    await served.recover()
    assert served.durability.membership is not None
    served.keeping = asyncio.create_task(served.durability.membership.keep())
    try:
        yield served
        check(served.executor)
    finally:
        served.keeping.cancel()
        served.durability.log.jobs.regular = None
        await served.kill()
