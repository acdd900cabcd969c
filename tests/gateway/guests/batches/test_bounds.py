"""What batches take is bounded: bytes that are read and written at once, files that are checked, rows that are read."""

import asyncio
import sqlite3
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plait.gateway import tables
from plait.gateway.guests.batches import keeper as module
from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.checking import MOST_ERRORS, CheckedLines
from plait.gateway.guests.batches.desk import MOST_ANSWERS, PART_BYTES, TABLES, Desk, FileRecord, LineAnswer
from plait.gateway.guests.batches.keeper import Keeper
from plait.gateway.guests.batches.running import Running

BATCH = Batch("batch_1", "blue", "id", "", "/v1/chat/completions", "file-1", "24h", 100, 1000, status="in_progress")
MB = 2**20


@pytest.fixture
def desk() -> Desk:
    made = Desk(tables.in_sqlite(TABLES, None))
    made.put_file("blue", FileRecord("file-1", "a", "batch", 100))
    made.add(BATCH, 9)
    made.claim("own", 100.0)
    return made


@pytest.fixture
async def keeper(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    thread = tables.TablesThread("batches")
    yield Keeper(desk, thread, "own")
    await thread.close(desk.close)


def run_of(keeper: Keeper, *sizes: int) -> Running:
    """A batch whose lines have answers of these sizes, which are not written."""
    lines = CheckedLines(BATCH.endpoint, len(sizes), lambda _model: True)
    lines.begins = array("Q", range(len(sizes)))
    run = Running(BATCH, lines=lines)
    for line, size in enumerate(sizes):
        keeper.answered(run, line, line % 3 == 2, bytes([97 + line % 26]) * size)
    return run


async def test_answers_are_written_some_mib_at_once(
    keeper: Keeper, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, save, written = run_of(keeper, 3 * MB, 3 * MB, 20 * MB, MB, MB), desk.save, list[int]()

    def saved(owner: str, batch: Batch, answers: list[LineAnswer]) -> None:
        if len(written) == 2:
            written.append(0)
            raise tables.DiskFullError("full")
        save(owner, batch, answers)
        written.append(sum(len(one.data) for one in answers) // MB)
        stored = desk.batch("blue", "batch_1")
        assert stored is not None
        assert stored.completed + stored.failed in (0, len(desk.answered("batch_1"))), "none is counted before"

    monkeypatch.setattr(desk, "save", saved)
    with pytest.raises(tables.TablesError):
        await keeper.write(run)
    assert ([one.line for one in run.ready], run.ready_bytes) == ([3, 4], 2 * MB)
    await keeper.write(run)
    assert (written, run.ready, run.ready_bytes) == ([6, 20, 0, 2], [], 0)
    assert desk.batch("blue", "batch_1") == run.batch
    assert len(desk.answered("batch_1")) == 5


async def test_a_file_is_made_of_some_mib_at_once(keeper: Keeper, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3 * MB, MB, 5, 3 * MB, 0, 7, 5 * MB, PART_BYTES - 1, 7, 9 * MB]
    run, answers, read = run_of(keeper, *sizes), desk.answers, list[int]()

    def counted(*args: Any, **kwargs: Any) -> list[LineAnswer]:
        found = answers(*args, **kwargs)
        read.append(sum(len(one.data) for one in found))
        return found

    monkeypatch.setattr(desk, "answers", counted)
    run.batch = run.batch.entered("finalizing", 101)
    await keeper.finish(run)
    ended = desk.batch("blue", "batch_1")
    assert ended is not None
    for failed, file_id in ((False, ended.output_file_id), (True, ended.error_file_id)):
        assert file_id is not None
        record = desk.file("blue", file_id)
        assert record is not None
        expected = [bytes([97 + line]) * size + b"\n" for line, size in enumerate(sizes) if (line % 3 == 2) == failed]
        assert desk.read(file_id, 0, record.bytes) == b"".join(expected)
    assert sorted(read)[-2:] == [7 * MB + 0, 9 * MB], "one that is larger comes alone"


def test_many_small_answers_are_read_in_parts(desk: Desk) -> None:
    desk.save("own", BATCH, [LineAnswer(line, False, b"x") for line in range(MOST_ANSWERS + 2)])
    first = desk.answers("batch_1", -1, failed=False)
    assert len(first) == MOST_ANSWERS
    assert [one.line for one in desk.answers("batch_1", first[-1].line, failed=False)] == [500, 501]
    assert desk.answers("batch_1", 501, failed=False) == desk.answers("batch_1", -1, failed=True) == []


async def test_a_file_is_read_no_further_than_it_is_checked(
    keeper: Keeper, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, part, checking, most = list[int](), desk.part, 0, 0

    def counted(file_id: str, number: int) -> bytes:
        parts.append(number)
        return part(file_id, number)

    async def to_thread(work: Callable[..., None], *args: Any) -> None:
        nonlocal checking, most
        checking += 1
        most = max(most, checking)
        await asyncio.sleep(0.02)  # others come so far, too, if they may
        work(*args)
        checking -= 1

    wrong = b"{\n" * (PART_BYTES // 2)
    desk.put_file("blue", FileRecord("file-1", "a", "batch", 100), [(number, wrong) for number in range(9)])
    monkeypatch.setattr(desk, "part", counted)
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    found = await asyncio.gather(*(keeper.checked(Running(BATCH), lambda _model: True) for _ in range(3)))
    assert [None if one is None else len(one.errors) for one in found] == [MOST_ERRORS] * 3
    assert (parts, most) == ([0, 0, 0], 1), "one file at a time, and its first part"


def plans(desk: Desk, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> Iterator[str]:
    """How SQLite finds the rows of what `work` asks for."""
    database, asked = desk.database, list[tuple[str, tuple[object, ...]]]()
    run = database._run

    def noted(statement: str, *values: object) -> list[Any]:
        asked.append((statement, values))
        return run(statement, *values)

    monkeypatch.setattr(database, "_run", noted)
    work()
    monkeypatch.undo()
    for statement, values in asked:
        if "batches_" in statement:
            yield from (row[3] for row in run(f"EXPLAIN QUERY PLAN {statement}", *values))


@pytest.mark.parametrize(
    "work",
    [
        lambda desk: desk.claim("own", 200.0),
        lambda desk: desk.renew("own", 200.0),
        lambda desk: desk.release("own"),
        lambda desk: desk.add(BATCH, 0),
        lambda desk: desk.add(msgspec.structs.replace(BATCH, id="batch_2"), 9),
        lambda desk: desk.batch("blue", "batch_1"),
        lambda desk: desk.batches("blue", 9),
        lambda desk: desk.save("own", BATCH),
        lambda desk: desk.answers("batch_1", 0, failed=True),
        lambda desk: desk.files("blue"),
        lambda desk: desk.held("blue"),
        lambda desk: desk.delete_file("blue", "file-2"),
    ],
)
def test_nothing_scans_all_files_or_batches(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, work: Callable[[Desk], object]
) -> None:
    found = list(plans(desk, monkeypatch, lambda: work(desk)))
    assert found
    assert all("SCAN" not in one or "batches_active" in one for one in found), found


def test_an_earlier_database_gets_the_indexes(tmp_path: Path) -> None:
    before = tables.Tables("batches", 1, [one for one in TABLES.statements if "INDEX" not in one])
    earlier = Desk(tables.in_sqlite(before, tmp_path / "files.db"))
    earlier.put_file("blue", FileRecord("file-1", "a", "batch", 100))
    assert earlier.add(BATCH, 1)
    earlier.close()
    desk = Desk(tables.in_sqlite(TABLES, tmp_path / "files.db"))
    assert desk.batch("blue", "batch_1") == BATCH
    desk.close()
    with sqlite3.connect(tmp_path / "files.db") as database:
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    assert {"batches_active", "batches_by_id"} <= names


async def test_usage_is_written_with_its_answers(keeper: Keeper, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that dies between two writes leaves the usage of the answers that it has written."""
    run, save, writes = run_of(keeper), desk.save, count(1)
    for line in range(4):
        keeper.answered(run, line, False, b"x" * 5 * MB, b'{"usage": {"prompt_tokens": 10, "completion_tokens": 1}}')

    def saved(owner: str, batch: Batch, answers: list[LineAnswer]) -> None:
        if next(writes) == 4:
            raise tables.DiskFullError("full")
        save(owner, batch, answers)

    monkeypatch.setattr(desk, "save", saved)
    with pytest.raises(tables.DiskFullError):
        await keeper.write(run)
    found = await keeper._thread.run(desk.batch, "blue", BATCH.id)
    assert found is not None
    assert (found.completed, found.usage) == (3, (30, 0, 3, 0))


async def test_a_batch_that_has_expired_stays_so_if_another_gateway_ends_it(
    keeper: Keeper, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def line(_run: Running, at: int) -> bytes:
        return b'{"custom_id": "%d", "url": "/", "body": {}}' % at

    async def dies(*_: object, **__: object) -> None:
        raise KeyError

    monkeypatch.setattr(keeper, "line", line)
    run, make_file = run_of(keeper, 5, 5), keeper._file
    assert run.lines is not None
    run.lines.begins = array("Q", range(3))
    run.batch = msgspec.structs.replace(run.batch, total=3)
    monkeypatch.setattr(keeper, "_file", dies)
    with pytest.raises(KeyError):
        await keeper.finish(run)
    monkeypatch.setattr(keeper, "_file", make_file)
    found = await keeper._thread.run(desk.batch, "blue", BATCH.id)
    assert found is not None
    following = Running(found, lines=run.lines)
    assert await keeper.unanswered(following, run.lines) == []
    await keeper.finish(following)
    found = await keeper._thread.run(desk.batch, "blue", BATCH.id)
    assert found is not None
    assert (found.status, found.completed, found.failed) == ("expired", 2, 1)
