"""What has an answer is not asked again while the disk is full, and waiting for the disk costs nothing."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator

import pytest

from plait.gateway import tables
from plait.gateway.guests.batches import keeper
from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.checking import CheckedLines
from plait.gateway.guests.batches.desk import TABLES, Desk, FileRecord
from plait.gateway.guests.batches.keeper import AT_ONCE, Keeper
from plait.gateway.guests.batches.running import Running

BATCH = Batch("batch_1", "blue", "id", "", "/v1/chat/completions", "file-1", "24h", 100, 1000, status="in_progress")
LINES = AT_ONCE + 36
LOOK_S = 0.01


class FullDisk:
    """A desk whose disk is full until it `has_room`. Counts the looks, which take a moment."""

    def __init__(self) -> None:
        self.has_room = False
        self.looks = 0
        database = tables.in_sqlite(TABLES, None)
        database._has_room = self._look
        self.desk = Desk(database)
        self.desk.put_file("blue", FileRecord("file-1", "a", "batch", 100))
        self.desk.add(BATCH, 1)
        self.desk.claim("own", 100.0)

    def _look(self) -> bool:
        self.looks += 1
        time.sleep(LOOK_S)
        return self.has_room


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    monkeypatch.setattr(keeper, "AGAIN_S", 0.02)
    monkeypatch.setattr(keeper, "WRITE_S", 0.001)
    return FullDisk()


@pytest.fixture
async def keeping(disk: FullDisk) -> AsyncIterator[Keeper]:
    thread = tables.TablesThread("batches")
    yield Keeper(disk.desk, thread, "own")
    await thread.close(disk.desk.close)


def run_of(keeping: Keeper) -> tuple[Running, CheckedLines]:
    """A batch all of whose lines have an answer that is not written."""
    lines = CheckedLines(BATCH.endpoint, LINES, lambda _model: True)
    lines.begins = array("Q", range(LINES))
    run = Running(BATCH, lines=lines)
    for line in range(LINES):
        keeping.answered(run, line, False, b"{}")
    return run, lines


async def test_answered_lines_are_not_asked_again(keeping: Keeper, disk: FullDisk) -> None:
    run, lines = run_of(keeping)
    writing = asyncio.create_task(keeping.keep_writing(run))
    for _ in range(3):
        await asyncio.sleep(0)
    assert run.writing.locked()
    asked = asyncio.create_task(keeping.unanswered(run, lines))
    await asyncio.sleep(0.1)
    assert not asked.done()
    disk.has_room = True
    assert await asked == []
    assert (run.batch.completed, len(disk.desk.answered(BATCH.id))) == (LINES, LINES)
    run.is_written = True
    await writing


async def test_a_full_disk_is_looked_at_now_and_then(keeping: Keeper, disk: FullDisk) -> None:
    run, _ = run_of(keeping)
    writing = asyncio.create_task(keeping.keep_writing(run))
    await asyncio.sleep(0.2)
    run.is_written = True
    await writing
    assert 1 <= disk.looks <= 0.2 / keeper.AGAIN_S + 2
    assert len(run.ready) == LINES
