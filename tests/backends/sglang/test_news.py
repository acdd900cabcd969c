"""News of a changed cache, from a scheduler to the API server and to those who wait there for a report."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack

import msgspec
import pytest

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.calls_journal import CallsJournal
from plait.backends.adapter.routes import ReportQuery
from plait.backends.adapter.state_reporter import StateReporter
from plait.backends.protocol.cache_state import CacheState, KvState
from plait.backends.sglang.channel import COVERED, VARIABLE, NewsReceiver, NewsSender, ReportSince, SchedulerQuery
from plait.backends.sglang.route import CacheStateRoute, SchedulerAccess
from tests.waiting import WITHIN_S


class Scheduler(SchedulerAccess):
    """A journal, and the cursors since which it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = CacheJournal()
        self.asked: list[int | None] = []
        self._reporter = StateReporter(
            engine="e",
            kind="sglang",
            epoch="now",
            model="m",
            block_tokens=32,
            policy="slo",
            journal=self.journal,
        )

    async def ask(self, query: SchedulerQuery) -> bytes:
        assert isinstance(query, ReportSince)
        self.asked.append(query.since)
        return msgspec.msgpack.encode(self.report(query.since, query.epoch, query.gateway))

    def report(self, since: int | None, epoch: str | None, gateway: str | None = None) -> CacheState:
        kv = KvState(10, 4, 3)
        return self._reporter.report(
            since, epoch, kv=kv, waiting_prompts=[], running=0, budget_tokens=512, preemptions=0, gateway=gateway
        )

    @property
    def calls(self) -> CallsJournal:
        return self._reporter.calls


class Setting:
    """A scheduler, both ends of its news, and the route."""

    def __init__(self, sockets: ExitStack) -> None:
        self.receiver = NewsReceiver()
        sockets.callback(self.receiver.close)
        self.sender = NewsSender({VARIABLE: self.receiver.name})
        sockets.callback(self.sender.close)
        self.scheduler = Scheduler()
        self.route = CacheStateRoute(self.scheduler, self.receiver, msgspec.msgpack.encode(None), 1)

    def store(self, block: int) -> None:
        """A step stores a block."""
        self.scheduler.journal.store(block, None)
        self.tell()

    def receive(self, key: str, gateway: str) -> None:
        """A call of a gateway arrives."""
        self.scheduler.calls.arrived(key, gateway, 130, lambda: (1, 2), is_urgent=False)
        self.tell()

    def end(self, key: str) -> None:
        """A call ends."""
        self.scheduler.calls.ended(key)
        self.tell()

    def tell(self) -> None:
        """A step has ended."""
        scheduler = self.scheduler
        self.sender.tell(scheduler.journal.cursor, scheduler.report, scheduler.calls.latest)

    async def reported(
        self, since: int | None, wait_s: float = 5.0, epoch: str = "now", gateway: str | None = None
    ) -> CacheState:
        report = await self.route._report({}, ReportQuery(since, epoch, wait_s, gateway))
        return msgspec.msgpack.decode(report, type=CacheState)


@pytest.fixture
async def sockets() -> AsyncIterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def setting(sockets: ExitStack) -> Setting:
    return Setting(sockets)


def stored(state: CacheState) -> list[int]:
    return [block for run in state.stored for block in run.hashes]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def test_processes_started_later_know_the_name(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "of an outer server")
    setting.receiver.announce()
    assert os.environ[VARIABLE] == setting.receiver.name


async def test_all_who_wait_get_the_change_without_a_further_question(setting: Setting) -> None:
    waiting = [asyncio.ensure_future(setting.reported(0)) for _ in range(2)]
    await until(lambda: len(setting.scheduler.asked) == 2)
    setting.store(7)
    for report in waiting:
        assert stored(await report) == [7]
    assert setting.scheduler.asked == [0, 0]


async def test_a_change_before_the_wait_needs_no_question(setting: Setting) -> None:
    setting.receiver.next(0)
    for block in range(1, 4):
        setting.store(block)
    await until(lambda: setting.receiver.follows(0, 3, "now"))
    assert stored(await setting.reported(1)) == [1, 2, 3], "applied again, the first changes nothing"
    assert setting.scheduler.asked == []


async def test_a_gateway_waits_while_only_its_own_calls_change(setting: Setting) -> None:
    waiting = {name: asyncio.ensure_future(setting.reported(0, gateway=name)) for name in "ab"}
    await until(lambda: len(setting.scheduler.asked) == 2)
    setting.receive("call-1", "a")
    calls = (await waiting["b"]).calls
    assert calls is not None
    (call,) = calls
    assert (call.gateway, call.hashes) == ("a", [1, 2])
    assert not waiting["a"].done()
    setting.end("call-1")
    await until(lambda: setting.receiver.follows(0, 2, "now"))
    assert not waiting["a"].done()
    setting.receive("call-2", "b")
    calls = (await waiting["a"]).calls
    assert calls is not None
    (call,) = calls
    assert (call.number, call.gateway) == (2, "b"), "without its own calls"
    assert (await setting.reported(1, gateway="b")).ended == [1]
    assert setting.scheduler.asked == [0, 0]


async def test_changes_of_a_restarted_scheduler_are_asked_for(setting: Setting) -> None:
    setting.receiver.next(0)
    setting.store(1)
    await until(lambda: setting.receiver.follows(0, 0, "now"))
    assert (await setting.reported(0, epoch="before")).snapshot
    assert setting.scheduler.asked == [0]


async def test_changes_from_too_long_ago_are_asked_for(setting: Setting) -> None:
    setting.receiver.next(0)
    for block in range(1, 3 * COVERED):
        setting.store(block)
        await until(lambda cursor=block: setting.receiver.follows(0, cursor, "now"))  # type: ignore[misc]
    assert stored(await setting.reported(0)) == list(range(1, 3 * COVERED))
    assert setting.scheduler.asked == [0]


async def test_lost_news_is_asked_for_after_a_while(setting: Setting) -> None:
    report = asyncio.ensure_future(setting.reported(0))
    await until(lambda: setting.scheduler.asked == [0])
    setting.scheduler.journal.store(7, None)
    assert stored(await report) == [7]


async def test_without_a_change_the_report_comes_at_the_end_of_the_wait(setting: Setting) -> None:
    assert (await setting.reported(0, wait_s=0.01)).cursor == 0
    assert (await setting.reported(0, wait_s=0)).cursor == 0
    assert (await setting.reported(None)).snapshot


async def test_a_scheduler_never_waits(setting: Setting) -> None:
    """Nobody reads; then there is nobody, or nobody who could be told."""
    for block in range(1, 1000):
        setting.store(block)
    setting.receiver.close()
    setting.store(1000)
    NewsSender({}).tell(1, setting.scheduler.report, setting.scheduler.calls.latest)


async def test_what_is_no_news_is_ignored(setting: Setting) -> None:
    setting.receiver.next(0)
    assert setting.sender._socket is not None
    setting.sender._socket.sendto(b"hello", f"\0{setting.receiver.name}")
    setting.store(1)
    await until(lambda: setting.receiver.follows(0, 1, "now"))
