"""Files, batches and answers in their tables: one owner writes, and what was answered stays."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from plait.gateway import tables
from plait.gateway.guests.batches import desk as module
from plait.gateway.guests.batches.batch import TRANSITIONS, Batch, Status
from plait.gateway.guests.batches.desk import (
    DELETED_AT_ONCE,
    KEPT_S,
    LEASE_S,
    PART_BYTES,
    TABLES,
    UPLOAD_S,
    Desk,
    FileInUseError,
    FileRecord,
    LineAnswer,
    NotOwnerError,
    id_at,
)

BATCH = Batch("batch_1", "blue", "id", "", "/v1/chat/completions", "file-1", "24h", 100, 1000)


@pytest.fixture
def desk() -> Desk:
    return Desk(tables.in_sqlite(TABLES, None))


def with_file(desk: Desk) -> Desk:
    """The same one, with the file of `BATCH`."""
    desk.put_file("blue", FileRecord("file-1", "a", "batch", 100), [(0, b"x")])
    return desk


def sweep(desk: Desk, now_s: float) -> int:
    """Delete all that is old. Returns in how many steps."""
    steps = 0
    while desk.expire(now_s):
        steps += 1
    return steps


def test_a_file_is_there_once_it_is_whole(desk: Desk) -> None:
    data = bytes(range(256)) * 10_000
    parts = [data[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)]
    for number, part in enumerate(parts[:-1]):
        desk.put_part("file-1", number, part)
    assert desk.file("blue", "file-1") is None
    record = FileRecord("file-1", "in.jsonl", "batch", 100, 200, len(data))
    desk.put_file("blue", record, [(len(parts) - 1, parts[-1])])
    assert desk.file("blue", "file-1") == record
    assert desk.file("red", "file-1") is None
    for begin, end in ((0, 10), (PART_BYTES - 5, PART_BYTES + 5), (len(data) - 3, len(data))):
        assert desk.read("file-1", begin, end) == data[begin:end]
    assert desk.part("file-1", len(parts)) == b""
    assert desk.held("blue") == (1, len(data))


def test_files_go_when_their_time_is_over_or_they_are_deleted(desk: Desk) -> None:
    for number in (1, 2):
        desk.put_file("blue", FileRecord(f"file-{number}", "a", "batch", 100, 100 + number), [(0, b"x")])
    sweep(desk, 102.0)
    assert [one.id for one in desk.files("blue")] == ["file-2"]
    assert desk.part("file-1", 0) == b""
    assert not desk.delete_file("red", "file-2")
    assert desk.delete_file("blue", "file-2")
    assert not desk.delete_file("blue", "file-2")
    assert (desk.files("blue"), desk.held("blue")) == ([], (0, 0))
    sweep(desk, 102.0)
    assert desk.part("file-2", 0) == b""


def test_a_long_file_goes_in_steps(desk: Desk) -> None:
    parts = 2 * DELETED_AT_ONCE + 1
    desk.put_file("blue", FileRecord("file-1", "a", "batch", 100, 101), [(part, b"x") for part in range(parts)])
    assert desk.expire(102.0)
    assert desk.file("blue", "file-1") is None, "the rest of it is nobody's"
    assert sweep(desk, 102.0) == 4


def test_a_full_disk_takes_no_file_and_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tables.in_sqlite(TABLES, tmp_path / "files.db")
    desk = Desk(database)
    desk.put_file("blue", FileRecord("file-2", "a", "batch", 100), [(0, b"x")])
    with_file(desk).add(BATCH, 1)
    desk.claim("a", 100.0)
    monkeypatch.setattr(tables, "disk_usage", lambda _: SimpleNamespace(total=2**40, free=tables.LEFT_BYTES - 1))
    for work in (
        lambda: desk.begin_file("blue", "file-3", 7, 100.0),
        lambda: desk.put_part("file-2", 1, b"x"),
        lambda: desk.save("a", BATCH, [LineAnswer(0, False, b"x")]),
    ):
        with pytest.raises(tables.DiskFullError):
            work()
    assert database.is_full
    desk.save("a", BATCH)
    assert desk.delete_file("blue", "file-2")
    assert sweep(desk, 102.0)


def test_a_file_that_its_gateway_does_not_renew_goes(desk: Desk) -> None:
    """The gateway is dead. A slow upload is renewed."""
    assert UPLOAD_S <= 600
    assert desk.begin_file("blue", "file-1", 7, 100.0) == (1, 7)
    desk.put_part("file-1", 0, b"x")
    assert desk.renew_file("file-1", 99.0 + UPLOAD_S)
    sweep(desk, 101.0 + UPLOAD_S)
    assert (desk.files("blue"), desk.held("blue")) == ([], (1, 7))
    sweep(desk, 100.0 + 2 * UPLOAD_S)
    assert (desk.held("blue"), desk.part("file-1", 0)) == ((0, 0), b"")
    assert not desk.renew_file("file-1", 100.0 + 2 * UPLOAD_S)


def test_a_whole_file_is_not_renewed(desk: Desk) -> None:
    assert not with_file(desk).renew_file("file-1", 100.0)
    assert sweep(desk, 1e9) == 0


def test_a_batch_is_of_a_whole_file_of_its_tenant(desk: Desk) -> None:
    assert desk.add(BATCH, 1) is None
    desk.begin_file("blue", "file-1", 1, 100.0)
    assert desk.add(BATCH, 1) is None
    assert with_file(desk).add(msgspec.structs.replace(BATCH, tenant="red"), 1) is None
    assert (desk.batches("blue", 9), desk.batches("red", 9)) == ([], [])


def test_a_file_whose_time_is_over_loses_no_part_at_first(desk: Desk) -> None:
    """In PostgreSQL a batch may begin while the file is looked at: the next look finds the batch."""
    desk.put_file("blue", FileRecord("file-1", "a", "batch", 100, 101), [(0, b"x")])
    assert desk.expire(102.0)
    assert (desk.file("blue", "file-1"), desk.add(BATCH, 1), desk.part("file-1", 0)) == (None, None, b"x")
    sweep(desk, 102.0)
    assert desk.part("file-1", 0) == b""


def test_a_file_stays_while_a_batch_reads_it(desk: Desk) -> None:
    desk.put_file("blue", FileRecord("file-1", "a", "batch", 100, 101), [(0, b"x")])
    desk.add(BATCH, 1)
    desk.expire(200.0)
    with pytest.raises(FileInUseError):
        desk.delete_file("blue", "file-1")
    desk.claim("a", 100.0)
    desk.end("a", BATCH.entered("failed", 101), [])
    assert desk.delete_file("blue", "file-1")


def test_a_batch_has_one_owner_at_a_time(desk: Desk) -> None:
    assert with_file(desk).add(BATCH, 1)
    assert desk.add(BATCH, 1) is False
    desk.claim("a", 100.0)
    desk.claim("b", 100.0 + LEASE_S - 1)
    assert desk.renew("b", 105.0) == []
    assert desk.renew("a", 105.0) == [(BATCH, False)]
    desk.cancel("blue", "batch_1", 105)
    assert desk.renew("a", 105.0) == [(BATCH, True)]
    desk.claim("b", 106.0 + LEASE_S)
    assert desk.renew("b", 106.0 + LEASE_S) == [(BATCH, True)]
    with pytest.raises(NotOwnerError):
        desk.save("a", BATCH, [LineAnswer(0, False, b"late")])
    assert desk.answered("batch_1") == []
    desk.release("b")
    desk.claim("a", 107.0 + LEASE_S)
    assert len(desk.renew("a", 107.0 + LEASE_S)) == 1


def test_an_answer_is_kept_once(desk: Desk) -> None:
    with_file(desk).add(BATCH, 9)
    desk.claim("a", 100.0)
    desk.save("a", BATCH, [LineAnswer(2, True, b"two"), LineAnswer(0, False, b"zero")])
    desk.save("a", BATCH, [LineAnswer(2, False, b"again"), LineAnswer(1, False, b"one")])
    assert [one.data for one in desk.answers("batch_1", -1, failed=False)] == [b"zero", b"one"]
    assert [one.data for one in desk.answers("batch_1", -1, failed=True)] == [b"two"]
    assert [one.line for one in desk.answers("batch_1", 0, failed=False)] == [1]
    ended = BATCH.entered("in_progress", 101).entered("finalizing", 102).entered("completed", 103)
    desk.end("a", ended, [FileRecord("file-out", "out", "batch_output", 103)])
    with pytest.raises(NotOwnerError):
        desk.save("a", BATCH)
    assert desk.batch("blue", "batch_1") == ended
    desk.claim("b", 10_000.0)
    assert desk.renew("b", 10_000.0) == []


@pytest.mark.parametrize("dies_after", [0, 2, 9])
def test_answers_go_a_few_at_a_time_once_their_batch_has_ended(desk: Desk, dies_after: int) -> None:
    """What a gateway leaves that dies meanwhile, others delete."""
    with_file(desk).add(BATCH, 9)
    desk.claim("a", 100.0)
    for line in range(5):
        desk.save("a", BATCH, [LineAnswer(line, False, b"x" * (module.MOST_BYTES // 2))])
    desk.end("a", BATCH.entered("failed", 101), [])
    left = [5, 3, 1, 0]
    for steps in range(1, dies_after + 1):
        assert desk.clear("batch_1") == (steps < len(left))
        assert len(desk.answered("batch_1")) == left[min(steps, len(left) - 1)]
    while desk.expire(102.0):
        pass
    assert desk.answered("batch_1") == []


def test_a_cancelled_batch_says_so_at_once(desk: Desk) -> None:
    with_file(desk).add(BATCH, 9)
    desk.claim("a", 100.0)
    desk.cancel("blue", "batch_1", 102)
    desk.cancel("blue", "batch_1", 103)
    desk.save("a", (running := BATCH.entered("in_progress", 102)))
    found = desk.batch("blue", "batch_1")
    assert found == running.entered("cancelling", 102) == desk.batches("blue", 9)[0]
    desk.save("a", (ends := running.entered("finalizing", 104)))
    assert desk.batch("blue", "batch_1") == ends


def test_a_batch_is_kept_for_a_month_after_its_end(desk: Desk) -> None:
    with_file(desk).add(BATCH, 9)
    desk.claim("a", 100.0)
    desk.expire(100.0 + 2 * KEPT_S)
    assert desk.batch("blue", "batch_1") == BATCH, "it has not ended"
    desk.end("a", BATCH.entered("failed", 101), [])
    desk.release("a")
    while desk.expire(100.0 + KEPT_S):
        pass
    assert desk.batch("blue", "batch_1") is not None
    desk.expire(107.0 + KEPT_S)
    assert desk.batch("blue", "batch_1") is None


def test_batches_come_latest_first_and_in_pages(desk: Desk) -> None:
    with_file(desk)
    for number in range(5):
        assert desk.add(msgspec.structs.replace(BATCH, id=f"batch_{number:024x}"), 9)
    ids = [one.id[-1] for one in desk.batches("blue", 3)]
    assert ids == ["4", "3", "2"]
    assert [one.id[-1] for one in desk.batches("blue", 3, f"batch_{2:024x}")] == ["1", "0"]
    assert desk.batches("red", 9) == []


def test_batches_of_before_are_older_than_new_ones(desk: Desk) -> None:
    with_file(desk)
    ids = [f"batch_{'f' * 24}", id_at(1.0) + "0" * 12, id_at(1.5) + "0" * 12, id_at(2e9) + "f" * 12]
    for batch_id in reversed(ids):
        assert desk.add(msgspec.structs.replace(BATCH, id=batch_id), 9)
    assert [one.id for one in desk.batches("blue", 9)] == ids[::-1]
    assert [one.id for one in desk.batches("blue", 9, ids[3], id_at(1.5))] == [ids[2]]


def test_the_oldest_go_of_very_many_that_have_ended(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT_BATCHES", 3)
    with_file(desk)
    for number in range(6):
        status: Status = "completed" if number % 2 else "in_progress"
        assert desk.add(msgspec.structs.replace(BATCH, id=f"batch_{number:024x}", status=status), 9)
    assert [one.id[-1] for one in desk.batches("blue", 9)] == ["5", "4", "3", "2", "0"], "what runs stays"


def test_states_follow_their_table() -> None:
    for status, following in TRANSITIONS.items():
        for other in TRANSITIONS:
            batch = Batch("b", "t", "i", "", "e", "f", "24h", 0, 1, status=status)
            if other in following:
                assert batch.entered(other, 7).at == {other: 7}
            else:
                with pytest.raises(ValueError, match="cannot become"):
                    batch.entered(other, 7)


def test_counts_and_usage_add_up() -> None:
    batch = BATCH.counted(failed=False, used=(5, 2, 3, 1)).counted(failed=True, used=(0, 0, 0, 0))
    shown = batch.shown()
    assert shown["request_counts"] == {"total": 0, "completed": 1, "failed": 1}
    assert shown["usage"]["total_tokens"] == 8
    assert shown["errors"] is None
