"""News of several data-parallel ranks: each has an epoch and a cursor of its own, and one may be silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import msgspec
import pytest

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.routes import ReportQuery
from plait.backends.adapter.state_reporter import StateReporter
from plait.backends.protocol.cache_state import CacheState, KvState
from plait.backends.sglang.channel import VARIABLE, NewsReceiver, NewsSender, ReportSince, SchedulerQuery
from plait.backends.sglang.route import CacheStateRoute, SchedulerAccess
from tests.waiting import WITHIN_S

RANKS = 3


class Rank:
    """A rank's journal, and its end of the news."""

    def __init__(self, rank: int, receiver: NewsReceiver, sockets: ExitStack) -> None:
        self.rank = rank
        self.epoch = f"epoch-{rank}"
        self.journal = CacheJournal()
        self._sender = NewsSender({VARIABLE: receiver.name}, rank)
        sockets.callback(self._sender.close)
        self._reporter = StateReporter(
            engine="e",
            kind="sglang",
            epoch=self.epoch,
            model="m",
            block_tokens=32,
            policy="slo",
            journal=self.journal,
        )

    def store(self, block: int) -> None:
        """A step stores a block."""
        self.journal.store(block, None)
        self._sender.tell(self.journal.cursor, self.report, self._reporter.calls.latest)

    def report(self, since: int | None, epoch: str | None, gateway: str | None = None) -> CacheState:
        kv = KvState(10, 4, 3)
        return self._reporter.report(
            since, epoch, kv=kv, waiting_prompts=[], running=0, budget_tokens=512, preemptions=0, gateway=gateway
        )


class Schedulers(SchedulerAccess):
    """All ranks get a query. While one is silent, there are no answers."""

    def __init__(self, ranks: list[Rank]) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.answering = asyncio.Event()
        self.answering.set()
        self._ranks = ranks

    async def ask(self, query: SchedulerQuery) -> bytes:
        assert isinstance(query, ReportSince)
        self.asked.append(query.rank)
        await self.answering.wait()
        return msgspec.msgpack.encode(self._ranks[query.rank].report(query.since, query.epoch))


class Server:
    """Ranks, and the API server's route."""

    def __init__(self, sockets: ExitStack) -> None:
        self.receiver = NewsReceiver()
        sockets.callback(self.receiver.close)
        self.ranks = [Rank(rank, self.receiver, sockets) for rank in range(RANKS)]
        self.schedulers = Schedulers(self.ranks)
        self._route = CacheStateRoute(self.schedulers, self.receiver, msgspec.msgpack.encode(None), RANKS)

    async def reported(self, rank: int, since: int | None, wait_s: float = 5.0, epoch: str | None = None) -> CacheState:
        query = ReportQuery(since, epoch or f"epoch-{rank}", wait_s, None, rank)
        return msgspec.msgpack.decode(await self._route._report({}, query), type=CacheState)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    with ExitStack() as sockets:
        yield Server(sockets)


def stored(state: CacheState) -> list[int]:
    return [block for run in state.stored for block in run.hashes]


async def waits(server: Server, queries: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while len(server.schedulers.asked) < queries:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def test_a_report_is_the_named_ranks(server: Server) -> None:
    for rank in server.ranks:
        rank.store(rank.rank + 10)
    for number in range(RANKS):
        report = await server.reported(number, None)
        assert (report.epoch, stored(report)) == (f"epoch-{number}", [number + 10])


async def test_news_of_a_rank_reaches_those_who_wait_for_it(server: Server) -> None:
    waiting = [asyncio.ensure_future(server.reported(rank, 0)) for rank in range(RANKS)]
    await waits(server, RANKS)
    server.ranks[1].store(7)
    report = await waiting[1]
    assert (report.epoch, stored(report)) == ("epoch-1", [7])
    assert not waiting[0].done()
    assert not waiting[2].done()
    for rank in (0, 2):
        server.ranks[rank].store(rank)
        assert stored(await waiting[rank]) == [rank]
    assert sorted(server.schedulers.asked) == list(range(RANKS)), "each only once, for want of earlier news"


async def test_news_of_several_ranks_in_one_burst_is_kept(server: Server) -> None:
    server.receiver.next(0)
    for block in range(3):
        for rank in server.ranks:
            rank.store(block)
    async with asyncio.timeout(WITHIN_S):
        for number in range(RANKS):
            assert stored(await server.reported(number, 0)) == [0, 1, 2]


async def test_the_epoch_of_another_rank_gets_a_snapshot(server: Server) -> None:
    server.receiver.next(0)
    for rank in server.ranks:
        rank.store(rank.rank)
    report = await server.reported(0, 0, epoch="epoch-1")
    assert (report.epoch, report.snapshot, stored(report)) == ("epoch-0", True, [0])


async def test_while_a_rank_is_silent_the_news_of_the_others_is_told(server: Server) -> None:
    server.schedulers.answering.clear()
    waiting = asyncio.ensure_future(server.reported(1, 0))
    await waits(server, 1)
    server.ranks[0].store(5)
    server.ranks[1].store(6)
    report = await waiting
    assert (report.epoch, stored(report)) == ("epoch-1", [6])
