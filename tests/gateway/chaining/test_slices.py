"""Slices of the event loop: who does how much in a turn, by a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest

from plait.gateway.chaining.slices import SLICE_S, Pieces, Slices


class Clock:
    """Each piece of work takes `piece_s`."""

    def __init__(self, piece_s: float) -> None:
        self.now_s = 0.0
        self.piece_s = piece_s

    def __call__(self) -> float:
        return self.now_s


class Turns:
    """Counts the turns of the loop, and the pieces that were done in each."""

    def __init__(self, piece_s: float) -> None:
        self.clock = Clock(piece_s)
        self.slices = Slices(self.clock)
        self.done: list[list[str]] = []

    def piece(self, name: str) -> None:
        self.clock.now_s += self.clock.piece_s
        self.done[-1].append(name)

    def work(self, name: str, pieces: int) -> Pieces[str]:
        for _ in range(pieces):
            self.piece(name)
            yield
        return name

    async def until_done(self, *tasks: asyncio.Task[str]) -> None:
        while not all(task.done() for task in tasks):
            self.done.append([])
            await asyncio.sleep(0)
            assert len(self.done) < 1_000, "nobody goes on"


async def test_work_that_fits_into_a_slice_is_done_in_one_turn() -> None:
    turns = Turns(SLICE_S / 10)
    task = asyncio.ensure_future(turns.slices.run("a", turns.work("a", 9)))
    await turns.until_done(task)
    assert task.result() == "a"
    assert [turn for turn in turns.done if turn] == [["a"] * 9]


async def test_longer_work_goes_on_in_later_turns() -> None:
    turns = Turns(SLICE_S / 10)
    task = asyncio.ensure_future(turns.slices.run("a", turns.work("a", 1_000)))
    await turns.until_done(task)
    assert sum(map(len, turns.done)) == 1_000
    assert max(map(len, turns.done)) == 10


async def test_the_works_of_several_share_a_slice() -> None:
    turns = Turns(SLICE_S / 10)
    tasks = [asyncio.ensure_future(turns.slices.run(name, turns.work(name, 100))) for name in "abc"]
    await turns.until_done(*tasks)
    assert sum(map(len, turns.done)) == 300
    assert max(map(len, turns.done)) <= 10


async def test_a_tenant_with_little_to_do_is_not_behind_one_with_much() -> None:
    turns = Turns(SLICE_S)  # one piece a turn
    many = [asyncio.ensure_future(turns.slices.run("many", turns.work("many", 1))) for _ in range(50)]
    await asyncio.sleep(0)
    few = asyncio.ensure_future(turns.slices.run("few", turns.work("few", 1)))
    await turns.until_done(*many, few)
    order = [name for turn in turns.done for name in turn]
    assert order.index("few") <= 2


async def test_a_tenants_tasks_begin_in_their_order() -> None:
    turns = Turns(SLICE_S / 3)
    names = [f"{number:03}" for number in range(100)]
    tasks = [asyncio.ensure_future(turns.slices.run("a", turns.work(name, 1))) for name in names]
    await turns.until_done(*tasks)
    order = [name for turn in turns.done for name in turn]
    assert sorted(order) == names
    assert max(abs(order.index(name) - names.index(name)) for name in names) < 32


@pytest.mark.parametrize("cancelled", [slice(0, 60), slice(40, 100), slice(3, 97)])
async def test_those_that_wait_go_on_when_others_are_cancelled(cancelled: slice) -> None:
    turns = Turns(SLICE_S)
    tasks = [asyncio.ensure_future(turns.slices.run("a", turns.work(str(number), 1))) for number in range(100)]
    turns.done.append([])
    for _ in range(3):  # some were woken and have not run yet
        await asyncio.sleep(0)
    for task in tasks[cancelled]:
        task.cancel()
    await turns.until_done(*tasks)
    ended = {number for number, task in enumerate(tasks) if not task.cancelled()}
    assert ended >= set(range(100)) - set(range(100)[cancelled])
    assert repr(turns.slices) == "Slices(waiting={})"


async def test_what_the_work_raises_is_raised_and_work_that_is_given_up_is_closed() -> None:
    turns, closed = Turns(SLICE_S / 10), []

    def fails() -> Pieces[str]:
        yield
        raise ValueError("no")

    def long() -> Pieces[str]:
        try:
            yield from turns.work("long", 1_000)
        finally:
            closed.append("long")
        return ""

    turns.done.append([])
    with pytest.raises(ValueError, match="no"):
        await turns.slices.run("a", fails())
    task = asyncio.ensure_future(turns.slices.run("a", long()))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == ["long"]
