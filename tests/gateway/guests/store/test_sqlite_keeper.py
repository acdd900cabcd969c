"""A log in a SQLite file: what was written is read again, and every way in which a file cannot be used is refused."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.gateway.guests.store.event_log import (
    CorruptStoreError,
    HeldElsewhereError,
    LeaseLostError,
    StoreError,
    StoreVersionError,
)
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
from plait.gateway.guests.store.sqlite_schema import MIGRATIONS
from plait.gateway.streams import Change, StreamKey

ONE, TWO = (StreamKey("session", "t", name) for name in ("one", "two"))


def event(stream: StreamKey, data: bytes | str) -> Change:
    return Change(stream, 1.5, data.encode() if isinstance(data, str) else data)


def end(stream: StreamKey) -> Change:
    return Change(stream, 2.0, None)


def contents(keeper: SqliteKeeper) -> dict[StreamKey, list[bytes | None]]:
    return {stream.key: [change.data for change in stream.events] for stream in keeper.read()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "plait.db"


@pytest.fixture
def keeper(path: Path) -> Iterator[SqliteKeeper]:
    keeper = SqliteKeeper(path)
    keeper.open()
    yield keeper
    keeper.close()


def reopened(path: Path) -> dict[StreamKey, list[bytes | None]]:
    keeper = SqliteKeeper(path)
    keeper.open()
    try:
        return contents(keeper)
    finally:
        keeper.close()


def test_what_was_written_is_read_by_the_next_gateway(path: Path, keeper: SqliteKeeper) -> None:
    keeper.write([event(ONE, "a"), event(TWO, "b"), event(ONE, "c")])
    keeper.write([event(TWO, "d")])
    keeper.close()
    assert reopened(path) == {ONE: [b"a", b"c"], TWO: [b"b", b"d"]}


def test_a_stream_that_has_ended_is_gone_and_its_name_can_be_used_again(path: Path, keeper: SqliteKeeper) -> None:
    keeper.write([event(ONE, "a"), event(TWO, "b")])
    keeper.write([end(ONE), event(ONE, "new")])
    keeper.close()
    assert reopened(path) == {TWO: [b"b"], ONE: [b"new"]}


def test_a_later_gateway_goes_on_with_the_streams_that_it_has_read(path: Path, keeper: SqliteKeeper) -> None:
    keeper.write([event(ONE, "a")])
    keeper.close()
    second = SqliteKeeper(path)
    assert second.open() == 2
    assert contents(second) == {ONE: [b"a"]}
    second.write([event(ONE, "b"), event(TWO, "c")])
    second.close()
    assert reopened(path) == {ONE: [b"a", b"b"], TWO: [b"c"]}


def test_file_and_folder_are_the_users_alone(path: Path, keeper: SqliteKeeper) -> None:
    keeper.write([event(ONE, "a")])
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


def test_a_deleted_value_is_in_no_file(path: Path, keeper: SqliteKeeper) -> None:
    secret = "a value that nobody may find again" * 200
    keeper.write([event(ONE, secret), event(TWO, "kept")])
    assert secret.encode()[:30] in b"".join(file.read_bytes() for file in path.parent.iterdir())
    keeper.write([end(ONE)])
    keeper.tidy()
    assert b"nobody may find" not in b"".join(file.read_bytes() for file in path.parent.iterdir())


def test_a_second_gateway_is_refused_until_the_first_has_closed(path: Path, keeper: SqliteKeeper) -> None:
    second = SqliteKeeper(path)
    with pytest.raises(HeldElsewhereError, match=rf"held by another gateway \(process {os.getpid()}\)"):
        second.open()
    keeper.close()
    assert second.open() == 2
    second.close()


def test_who_has_lost_the_lease_writes_nothing_more(path: Path, keeper: SqliteKeeper) -> None:
    keeper.write([event(ONE, "a")])
    with closing(sqlite3.connect(path)) as other:
        other.execute("UPDATE leases SET epoch = epoch + 1")
        other.commit()
    with pytest.raises(LeaseLostError, match=r"taken over \(epoch 2"):
        keeper.write([event(ONE, "b")])
    keeper.close()
    assert reopened(path) == {ONE: [b"a"]}


def test_a_write_that_fails_leaves_nothing_behind(path: Path, keeper: SqliteKeeper) -> None:
    keeper.write([event(ONE, "a")])
    with closing(sqlite3.connect(path)) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON events WHEN new.data = x'62' BEGIN SELECT raise(ABORT, 'full'); END"
        )
        with pytest.raises(StoreError, match="full"):
            keeper.write([end(ONE), event(TWO, "x"), event(TWO, "b")])
        other.execute("DROP TRIGGER full")
    keeper.write([event(TWO, "b"), event(ONE, "c")])
    keeper.close()
    assert reopened(path) == {ONE: [b"a", b"c"], TWO: [b"b"]}


def test_a_full_disk_is_no_corruption_and_may_have_room_again(path: Path, keeper: SqliteKeeper) -> None:
    keeper.write([event(ONE, "a")])
    database = keeper._opened
    database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(StoreError, match="full") as caught:
        keeper.write([event(ONE, b"x" * 100_000)])
    assert not isinstance(caught.value, CorruptStoreError)
    database.execute("PRAGMA max_page_count = 100000")
    keeper.write([event(ONE, "b")])
    keeper.close()
    assert reopened(path) == {ONE: [b"a", b"b"]}


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"no database, but somebody's text " * 100)
    path.chmod(0o600)
    keeper = SqliteKeeper(path)
    with pytest.raises(ValueError, match=r"is no SQLite database: name a new file, or put the store back$"):
        keeper.check()
    with pytest.raises(CorruptStoreError, match="file is not a database"):
        keeper.open()
    assert path.read_bytes().startswith(b"no database")


def test_a_file_whose_first_page_is_in_its_wal_may_be_a_database(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"\0" * 4096)
    path.chmod(0o600)
    Path(f"{path}-wal").write_bytes(b"frames")
    SqliteKeeper(path).check()


def test_an_older_schema_is_brought_forward_and_a_newer_one_is_refused(path: Path, keeper: SqliteKeeper) -> None:
    keeper.write([event(ONE, "a")])
    keeper.close()

    def third(database: sqlite3.Connection) -> None:
        database.execute("ALTER TABLE events ADD COLUMN note TEXT")

    later = SqliteKeeper(path, migrations=[*MIGRATIONS, third])
    later.open()
    assert contents(later) == {ONE: [b"a"]}
    later.close()
    before = path.read_bytes()
    for keeper_of_now in (SqliteKeeper(path), SqliteKeeper(path)):
        with pytest.raises(
            StoreVersionError, match=r"written by a later version of Plait \(schema 3, this one knows 2"
        ):
            keeper_of_now.check()
        with pytest.raises(StoreVersionError):
            keeper_of_now.open()
        keeper_of_now.close()
    assert path.read_bytes() == before


def test_a_migration_that_fails_changes_nothing(path: Path, keeper: SqliteKeeper) -> None:
    keeper.write([event(ONE, "a")])
    keeper.close()

    def broken(database: sqlite3.Connection) -> None:
        database.execute("DROP TABLE streams")
        database.execute("no SQL")

    later = SqliteKeeper(path, migrations=[*MIGRATIONS, broken])
    with pytest.raises(StoreError, match="syntax"):
        later.open()
    later.close()
    assert reopened(path) == {ONE: [b"a"]}


def test_another_programs_database_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
        other.commit()
    path.chmod(0o600)
    with pytest.raises(StoreVersionError, match="database of another program"):
        SqliteKeeper(path).check()


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.binary(max_size=20)), max_size=6), max_size=8)
)
def test_any_changes_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, batches: Sequence[Sequence[tuple[str, bytes | None]]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "store" / "plait.db"
    expected: dict[StreamKey, list[bytes | None]] = {}
    keeper = SqliteKeeper(path)
    keeper.open()
    for number, batch in enumerate(batches):
        keeper.write([Change(StreamKey("k", "t", name), 0.0, data) for name, data in batch])
        for name, data in batch:
            key = StreamKey("k", "t", name)
            if data is None:
                expected.pop(key, None)
            else:
                expected.setdefault(key, []).append(data)
        if number % 3 == 2:
            keeper.close()
            keeper = SqliteKeeper(path)
            keeper.open()
            assert contents(keeper) == expected
    assert contents(keeper) == expected
    keeper.close()
