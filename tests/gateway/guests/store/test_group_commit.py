"""The store's thread: order, waiting, a keeper that fails or is held elsewhere, and what has no room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from plait.gateway.guests.store import group_commit, jobs
from plait.gateway.guests.store.event_log import HeldElsewhereError, LeaseLostError, StoreError, StoreVersionError
from plait.gateway.guests.store.group_commit import GroupCommit
from plait.gateway.streams import Change, StoredStream, StreamKey
from tests.waiting import WITHIN_S

ONE, TWO = (StreamKey("session", "t", name) for name in ("one", "two"))


def event(data: str, stream: StreamKey = ONE) -> Change:
    return Change(stream, 0.0, data.encode())


class Memory:
    """A keeper that writes into a list. It waits while `gate` is closed, and raises `problem`."""

    def __init__(self, stored: Sequence[StoredStream] = ()) -> None:
        self.stored = stored
        self.written: list[list[bytes | None]] = []
        self.again: list[bool] = []
        self.problem: Exception | None = None
        self.opening_problem: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.calls: list[str] = []

    def check(self) -> None:
        pass

    def open(self) -> int:
        self.calls.append("open")
        if self.opening_problem is not None:
            raise self.opening_problem
        return 1

    def read(self) -> Iterator[StoredStream]:
        return iter(self.stored)

    def write(self, changes: Sequence[Change], *, again: bool = False) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        if self.problem is not None:
            raise self.problem
        self.written.append([change.data for change in changes])
        self.again.append(again)

    def stream(self, key: StreamKey) -> StoredStream:
        return StoredStream(key, [])

    def tidy(self) -> None:
        self.calls.append("tidy")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "RETRY_S", 0.001)


async def opened(memory: Memory, **limits: int) -> GroupCommit:
    commit = GroupCommit(memory, **limits)
    commit.start()
    await commit.streams()
    return commit


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0)


async def test_all_that_came_while_it_wrote_is_one_commit_in_order() -> None:
    memory = Memory()
    commit = await opened(memory)
    memory.gate.clear()
    commit.append([event("a")])
    await asyncio.to_thread(memory.entered.wait, 10)
    commit.append([event("b"), event("c")])
    commit.append([event("d")])
    waiting = [asyncio.ensure_future(commit.committed(ONE)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    memory.gate.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert memory.written == [[b"a"], [b"b", b"c", b"d"]]
    assert await commit.committed(ONE), "nothing is left"
    await commit.close()
    assert memory.calls[-1] == "close"


async def test_what_was_stored_is_given_once_the_lease_is_there() -> None:
    memory = Memory([StoredStream(ONE, [event("a")])])
    memory.opening_problem = HeldElsewhereError("held by another")
    commit = GroupCommit(memory)
    commit.start()
    await until(lambda: commit.problem == "held by another")
    commit.append([event("b")])
    assert not await commit.committed(ONE)
    memory.opening_problem = None
    assert [stream.key for stream in await commit.streams()] == [ONE]
    assert await commit.committed(ONE)
    assert memory.written == [[b"b"]], "what came before is written, too"
    await commit.close()


async def test_a_failing_keeper_says_so_and_goes_on_where_it_was() -> None:
    memory = Memory()
    commit = await opened(memory)
    memory.problem = StoreError("disk full")
    commit.append([event("a")])
    assert not await commit.committed(ONE)
    assert commit.problem == "disk full"
    commit.append([event("b")])
    assert not await commit.committed(ONE)
    memory.problem = None
    await until(lambda: commit.problem is None)
    assert await commit.committed(ONE)
    await commit.close()
    assert [data for batch in memory.written for data in batch] == [b"a", b"b"]
    assert memory.again == [True, False]


async def test_beyond_the_backlog_a_stream_keeps_its_beginning_only() -> None:
    memory = Memory()
    commit = await opened(memory, max_backlog_bytes=600)
    memory.problem = StoreError("disk full")
    for data in "abc":
        commit.append([event(data)])
    commit.append([event("d")])  # 771 bytes wait already
    memory.problem = None
    await until(lambda: commit.problem is None and commit.backlog_bytes == 0)
    commit.append([event("e"), event("other", TWO)])
    assert not await commit.committed(ONE)
    assert await commit.committed(TWO)
    commit.append([Change(ONE, 0.0, None), event("anew")])
    assert await commit.committed(ONE)
    await commit.close()
    assert [data for batch in memory.written for data in batch] == [b"a", b"b", b"c", b"other", None, b"anew"]


async def test_a_commit_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    commit = await opened(memory)
    monkeypatch.setattr(group_commit, "STALLED_S", 0.01)
    memory.gate.clear()
    commit.append([event("a")])
    assert not await commit.committed(ONE)
    assert commit.problem == "a commit takes longer than 0.01 s"
    memory.gate.set()
    await until(lambda: commit.problem is None)
    assert await commit.committed(ONE)
    await commit.close()


async def test_a_store_that_does_not_answer_is_a_problem_without_a_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, renewed, gate = Memory(), threading.Event(), threading.Event()
    gate.set()

    def renew() -> None:
        renewed.set()
        assert gate.wait(WITHIN_S)

    commit = GroupCommit(memory)
    commit.jobs.regular = renew
    monkeypatch.setattr(jobs, "REGULAR_S", 0.01)
    monkeypatch.setattr(group_commit, "STALLED_S", 0.5)
    commit.start()
    await commit.streams()
    assert await asyncio.to_thread(renewed.wait, WITHIN_S)
    assert commit.problem is None
    gate.clear()
    await until(lambda: commit.problem == "no answer for 0.5 s")
    assert not await commit.committed(ONE)
    gate.set()
    await until(lambda: commit.problem is None)
    await commit.close()


@pytest.mark.parametrize("error", [LeaseLostError("taken over"), StoreVersionError("a later version")])
async def test_what_can_never_be_written_again_is_over(error: Exception) -> None:
    memory = Memory()
    commit = await opened(memory)
    memory.problem = error
    commit.append([event("a")])
    assert not await commit.committed(ONE)
    await until(lambda: memory.calls[-1] == "close")
    assert commit.problem == str(error)
    await commit.close()


async def test_it_can_be_closed_while_another_holds_the_log() -> None:
    memory = Memory()
    memory.opening_problem = HeldElsewhereError("held by another")
    commit = GroupCommit(memory)
    commit.start()
    commit.append([event("a")])
    await commit.close()
    assert memory.written == []


async def test_the_end_writes_what_is_left() -> None:
    memory = Memory()
    commit = await opened(memory)
    for data in "abc":
        commit.append([event(data)])
    await commit.close()
    assert [data for batch in memory.written for data in batch] == [b"a", b"b", b"c"]


async def test_it_is_tidied_once_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "TIDY_S", 0.001)
    memory = Memory()
    commit = await opened(memory)
    commit.append([event("a")])
    await until(lambda: "tidy" in memory.calls)
    await commit.close()


# What several gateways need that share a log.


async def test_what_is_asked_of_the_keeper_is_done_after_what_was_appended() -> None:
    memory = Memory()
    commit = await opened(memory)
    memory.gate.clear()
    commit.append([event("a")])
    asked = asyncio.ensure_future(commit.run(lambda: list(memory.written)))
    await asyncio.sleep(0.01)
    assert not asked.done()
    memory.gate.set()
    assert await asked == [[b"a"]]
    await commit.close()


async def test_nothing_is_asked_in_vain_of_a_store_that_is_away() -> None:
    memory = Memory()
    commit = await opened(memory)

    def away() -> None:
        raise StoreError("no route to host")

    with pytest.raises(StoreError, match="no route to host"):
        await commit.run(away)
    assert commit.problem == "no route to host"
    assert await commit.run(lambda: 1) == 1
    assert not commit.problem, "it is back"
    memory.problem = StoreError("away")
    commit.append([event("a")])
    with pytest.raises(StoreError, match="away"):
        await commit.run(lambda: 1)
    memory.problem = None
    await commit.close()


async def test_after_a_lost_lease_nothing_is_written_until_all_that_hung_on_it_is_gone() -> None:
    memory, lost = Memory(), asyncio.Event()
    commit = await opened(memory)
    commit.on_lost = lost.set
    memory.problem = LeaseLostError("taken over")
    commit.append([event("a")])
    assert not await commit.committed(ONE)
    await lost.wait()
    memory.problem = None
    commit.append([event("of before")])
    assert memory.written == []
    commit.reopen()
    assert await commit.streams() == []
    commit.append([event("b", TWO)])
    assert await commit.committed(TWO)
    assert memory.written == [[b"b"]]
    assert memory.calls.count("open") == 2
    await commit.close()


async def test_it_can_be_closed_while_it_waits_to_be_opened_again() -> None:
    memory, lost = Memory(), asyncio.Event()
    commit = await opened(memory)
    commit.on_lost = lost.set

    def renew() -> None:
        raise LeaseLostError("taken over")

    with pytest.raises(LeaseLostError):
        await commit.run(renew)
    await lost.wait()
    await commit.close()
    assert memory.calls[-1] == "close"


class Watched(asyncio.Future[bool]):
    """A waiter that the thread's commit comes to while the loop looks at it."""

    commit: threading.Event
    committed: threading.Event

    def done(self) -> bool:
        if not self.commit.is_set():
            self.commit.set()
            assert self.committed.wait(10)
        return super().done()


async def test_a_commit_while_the_loop_looks_who_waits_is_heard() -> None:
    memory, waiter = Memory(), Watched()
    log = await opened(memory)
    waiter.commit, waiter.committed = memory.gate, threading.Event()
    memory.gate.clear()
    log.append([event("a")])
    await until(memory.entered.is_set)
    log._waiters._waiting.append((log._appended, waiter))
    tell = log._tell

    def told() -> None:
        tell()
        waiter.committed.set()

    log._tell = told  # type: ignore[method-assign]
    log._settle()
    assert await asyncio.wait_for(waiter, WITHIN_S)
    await log.close()
