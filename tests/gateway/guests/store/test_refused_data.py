"""Data that the log refuses: what is at fault is left out alone, whatever else is in its commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from math import log2
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.guests.store import group_commit
from plait.gateway.guests.store.event_log import RefusedDataError, StoreError
from plait.gateway.guests.store.metrics import StoreCollector
from plait.gateway.guests.store.split_writer import SplitWriter
from plait.gateway.streams import Change, StreamKey
from tests.gateway.guests.store.test_group_commit import Memory, opened

BAD = b"bad"


def stream(name: str) -> StreamKey:
    return StreamKey("session", "t", name)


def change(data: bytes | None, name: str) -> Change:
    return Change(stream(name), 0.0, data)


class Log:
    """Refuses a commit that has `BAD` in it, and breaks as often as it is told."""

    def __init__(self) -> None:
        self.written: list[Change] = []
        self.tries = 0

    def commit(self, changes: Sequence[Change]) -> None:
        self.tries += 1
        if any(change.data == BAD for change in changes):
            raise RefusedDataError("no value of its type")
        self.written += changes


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_exactly_the_batches_at_fault_are_left_out(faults: list[bool]) -> None:
    log, writer = Log(), SplitWriter()
    batches = [[change(b"%d" % n, f"s{n}"), *([change(BAD, f"s{n}")] if bad else [])] for n, bad in enumerate(faults)]
    writer.write(batches, log.commit)
    assert log.written == [one for batch, bad in zip(batches, faults, strict=True) if not bad for one in batch]
    assert writer.cut == {stream(f"s{n}") for n, bad in enumerate(faults) if bad}
    assert (writer.refused, writer.changes) == (sum(faults), len(log.written))
    assert log.tries <= 1 + sum(faults) * 2 * (log2(len(faults)) + 1)


EVENTS = st.tuples(st.sampled_from(["new", "more", "end", "bad"]), st.sampled_from("abc"))


@given(st.lists(st.lists(st.lists(EVENTS, min_size=1, max_size=3), max_size=12), max_size=4))
def test_what_is_stored_of_a_stream_is_a_beginning(commits: list[list[list[tuple[str, str]]]]) -> None:
    """An oracle that takes one batch after the other."""
    data: dict[str, bytes | None] = {"new": b"new", "more": b"more", "end": None, "bad": BAD}
    log, writer, expected, cut = Log(), SplitWriter(), list[Change](), set[StreamKey]()
    for given_batches in commits:
        batches = [[change(data[kind], name) for kind, name in batch] for batch in given_batches]
        writer.write(batches, log.commit)
        for batch in batches:
            left, before = list[Change](), set(cut)
            for one in batch:
                cut -= {one.stream} if one.data is None else set()
                left += [one] if one.stream not in cut else []
            if any(one.data == BAD for one in left):
                ends = list(takewhile(lambda one: one.data is None, batch))
                expected += ends
                cut = before - {one.stream for one in ends} | {one.stream for one in batch if one.data is not None}
            else:
                expected += left
    assert log.written == expected
    assert writer.cut == cut


def test_a_session_whose_successor_is_refused_does_not_come_back() -> None:
    log, writer = Log(), SplitWriter()
    writer.write([[change(b"first", "s")], [change(None, "s"), change(BAD, "s")], [change(b"later", "s")]], log.commit)
    assert [one.data for one in log.written] == [b"first", None]
    assert writer.cut == {stream("s")}
    assert writer.refused == 1


def test_a_stream_that_cannot_be_kept_under_another_name_stays_where_it_is() -> None:
    log, writer = Log(), SplitWriter()
    writer.write([[change(None, "aside"), change(BAD, "aside"), change(None, "s")]], log.commit)
    assert log.written == [change(None, "aside")]


def test_another_failure_between_halves_is_raised() -> None:
    log, writer = Log(), SplitWriter()
    batches = [[change(b"%d" % n, "s")] for n in range(4)] + [[change(BAD, "bad")]]

    def commit(changes: Sequence[Change]) -> None:
        log.commit(changes)
        if len(changes) == 1:
            raise StoreError("away")

    with pytest.raises(StoreError, match="away"):
        writer.write(batches, commit)
    assert writer.refused == 0


# In the thread.


class Refusing(Memory):
    """Refuses what has `BAD` in it."""

    def write(self, changes: Sequence[Change], *, again: bool = False) -> None:
        if any(change.data == BAD for change in changes):
            self.entered.set()
            assert self.gate.wait(10)
            raise RefusedDataError("no value of its type")
        super().write(changes, again=again)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "RETRY_S", 0.001)


async def test_others_of_the_commit_are_stored_and_only_who_is_at_fault_is_told_otherwise() -> None:
    memory = Refusing()
    commit = await opened(memory)
    memory.gate.clear()
    commit.append([change(b"first", "first")])
    await asyncio.to_thread(memory.entered.wait, 10)
    names = ["a", "bad", "b"]
    for name in names:
        commit.append([change(BAD if name == "bad" else b"1", name)])
    told = [asyncio.ensure_future(commit.committed(stream(name))) for name in names]
    await asyncio.sleep(0)
    memory.gate.set()
    assert await asyncio.gather(*told) == [True, False, True]
    assert commit.problem is None
    assert memory.written == [[b"first"], [b"1"], [b"1"]]
    commit.append([change(b"later", "bad")])
    assert not await commit.committed(stream("bad")), "a stream keeps its beginning"
    commit.append([change(None, "bad"), change(b"anew", "bad")])
    assert await commit.committed(stream("bad"))
    await commit.close()


async def test_a_question_that_is_refused_fails_alone_and_is_counted() -> None:
    commit = await opened(Memory())

    def refused() -> NoReturn:
        raise RefusedDataError("no value of its type")

    asked = [asyncio.ensure_future(commit.run(work)) for work in (refused, lambda: 7)]
    with pytest.raises(RefusedDataError):
        await asked[0]
    assert await asked[1] == 7
    assert commit.problem is None
    (refused_now,) = [metric for metric in StoreCollector(commit).collect() if metric.name == "plait_store_refused"]
    assert [sample.value for sample in refused_now.samples] == [1]
    await commit.close()
