"""Damage of a store's files costs what it has hit, is counted, and is never taken for a new or an unchanged store."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from plait.gateway.guests.store.damage import Damage
from plait.gateway.guests.store.event_log import CorruptStoreError, StoreError, StoreVersionError, set_aside
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
from plait.gateway.streams import Change, StreamKey

STREAMS, EVENTS = 12, 4
SIZES = (20, 300, 900, 6_000)
"""Of an event's data: some share a page, and some have pages of their own."""

FLIPS = 250 if "PLAIT_NIGHTLY" in os.environ else 40


def key(number: int) -> StreamKey:
    return StreamKey("session", "t", f"s{number}")


def written() -> dict[StreamKey, list[Change]]:
    """What the stores of these tests hold."""
    random = Random(1)
    return {
        key(number): [
            Change(key(number), 1e9 + place, random.randbytes(SIZES[(number + place) % len(SIZES)]), 1)
            for place in range(EVENTS)
        ]
        for number in range(STREAMS)
    }


class Found:
    """What a gateway finds in the store: the streams that are as they should be, and those with a problem."""

    def __init__(self, path: Path) -> None:
        self.damage = Damage()
        keeper = SqliteKeeper(path, damage=self.damage)
        keeper.check()
        try:
            keeper.open()
            streams = list(keeper.read())
        finally:
            keeper.close()
        self.whole = {stream.key: list(stream.events) for stream in streams if stream.problem is None}
        self.problems = {stream.key: stream.problem for stream in streams if stream.problem is not None}

    @property
    def counts(self) -> dict[str, int]:
        return {kind: count for kind, count in self.damage.counts.items() if count}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "plait.db"


@pytest.fixture
def store(path: Path) -> Path:
    """A store that was closed."""
    keeper = SqliteKeeper(path)
    keeper.open()
    for number in range(EVENTS):
        keeper.write([events[number] for events in written().values()])
    keeper.close()
    return path


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def bits(file: Path) -> Iterator[int]:
    """Any, and among them some of the names of streams and of the file's header."""
    random, content = Random(2), file.read_bytes()
    names = [content.rfind(f"sessionts{number}".encode()) for number in range(STREAMS)]
    yield from (8 * (place + 3) + bit for place in names[:3] if place > 0 for bit in (0, 7))
    yield from (8 * byte for byte in (0, 24, 30, 43, 59, 71, 100, 103))
    yield from (random.randrange(8 * len(content)) for _ in range(FLIPS))


def test_one_flipped_bit_costs_one_stream_or_the_file_is_refused(store: Path, tmp_path: Path) -> None:
    expected = written()
    refused = later = lost = 0
    for number, bit in enumerate(bits(store)):
        folder = tmp_path / str(number)
        shutil.copytree(store.parent, folder)
        flip(folder / store.name, bit)
        try:
            found = Found(folder / store.name)
        except StoreVersionError:  # a flip in the file's version
            later += 1
            continue
        except CorruptStoreError:
            refused += 1
            continue
        missing = expected.keys() - found.whole.keys()
        for stream, events in found.whole.items():
            assert events == expected[stream], f"bit {bit}: what is read is what was written"
        lost += len(missing)
        assert len(missing) == len(found.problems) <= 1, f"bit {bit}: {missing} is missing in silence"
        shutil.rmtree(folder)
    assert lost > FLIPS / 10
    assert refused
    assert later <= 4


def test_a_malformed_file_is_refused_and_left_as_it_is(store: Path) -> None:
    copy = store.read_bytes()
    with store.open("r+b") as file:
        file.seek(4096 * (store.stat().st_size // 4096 // 2))
        file.write(os.urandom(4096))
    malformed = store.read_bytes()
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=r"is malformed \(.*\) and is left as it is: put a copy back"):
            Found(store)
        assert store.read_bytes() == malformed
    store.write_bytes(copy)
    assert Found(store).whole == written()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("DELETE FROM events WHERE event = (3 << 24) + 1", f"events before event {(3 << 24) + 2} are gone"),
        ("DELETE FROM events WHERE event >> 24 = 3", "its events are gone"),
        ("UPDATE events SET at_unix_s = 2e9 WHERE event = 3 << 24", f"event {3 << 24} is not what was written"),
        ("UPDATE events SET data = 'a text' WHERE event = 3 << 24", f"event {3 << 24} is malformed"),
        ("UPDATE events SET version = 'a text' WHERE event = 3 << 24", f"event {3 << 24} is malformed"),
        ("UPDATE streams SET name = x'00ff' WHERE stream = 3", f"event {3 << 24} is not what was written"),
        ("UPDATE streams SET tenant = 'other' WHERE stream = 3", f"event {3 << 24} is not what was written"),
        ("UPDATE events SET event = event + (90 << 24) WHERE event >> 24 = 3", "its events are gone"),
    ],
)
def test_a_stream_is_what_was_written_or_has_a_problem(store: Path, change: str, problem: str) -> None:
    with closing(sqlite3.connect(store)) as database:
        database.execute(change)
        database.commit()
    found = Found(store)
    assert problem in found.problems.values()
    assert found.whole == {stream: events for stream, events in written().items() if stream in found.whole}
    assert len(found.whole) == STREAMS - 1


def test_a_stream_whose_names_are_gone_is_told_with_its_events(store: Path) -> None:
    with closing(sqlite3.connect(store)) as database:
        database.execute("DELETE FROM streams WHERE stream = 3")
        database.commit()
    assert Found(store).problems == {StreamKey("lost", "", "3"): "its names are gone"}


def test_the_last_stream_without_its_names_can_be_set_aside(store: Path) -> None:
    with closing(sqlite3.connect(store)) as database:
        database.execute("DELETE FROM streams WHERE stream = (SELECT max(stream) FROM streams)")
        database.commit()
    keeper = SqliteKeeper(store)
    keeper.open()
    (lost,) = [stream for stream in keeper.read() if stream.problem is not None]
    keeper.write([*set_aside(lost), Change(key(99), 2e9, b"later")])
    keeper.close()
    found = Found(store)
    assert found.problems == {}
    kept = found.whole[lost.key._replace(kind="unreadable lost")]
    assert [event.data for event in kept] == [event.data for event in lost.events]
    assert [event.data for event in found.whole[key(99)]] == [b"later"]


@pytest.mark.parametrize("command", ["ANALYZE", "VACUUM", "REINDEX"])
def test_what_an_operator_does_to_a_store_is_no_damage(store: Path, command: str) -> None:
    with closing(sqlite3.connect(store)) as database:
        database.execute(command)
    found = Found(store)
    assert (found.whole, found.problems, found.counts) == (written(), {}, {})


@pytest.mark.parametrize("table", ["leases", "streams", "events"])
def test_a_definition_that_is_no_text_is_damage_of_the_file(store: Path, table: str) -> None:
    flip(store, 8 * (store.read_bytes().find(f"CREATE TABLE {table}".encode()) + 3) + 7)
    with pytest.raises(CorruptStoreError):
        Found(store)


def test_checksums_of_the_schema_before_are_known(path: Path, store: Path) -> None:
    with closing(sqlite3.connect(store)) as database:
        for event, data in database.execute("SELECT event, data FROM events").fetchall():
            database.execute("UPDATE events SET checksum = ? WHERE event = ?", (crc32(data), event))
        database.commit()
    assert Found(path).whole == written()


@pytest.mark.parametrize("empty", [False, True])
def test_a_file_that_has_vanished_is_not_made_anew(store: Path, *, empty: bool) -> None:
    store.unlink()
    if empty:
        store.touch(0o600)
    keeper = SqliteKeeper(store)
    for ask in (keeper.check, keeper.open):
        with pytest.raises((ValueError, StoreError), match="though a gateway has kept its sessions there: put it back"):
            ask()
    keeper.close()
    Path(f"{store}.lock").unlink()
    assert Found(store).whole == {}, "the operator has said so"


def test_a_file_that_has_vanished_under_its_wal_is_not_made_anew(path: Path) -> None:
    killed(path)
    path.write_bytes(b"")
    Path(f"{path}.lock").unlink()
    with pytest.raises(StoreError, match="though a gateway has kept its sessions there"):
        SqliteKeeper(path).open()


def test_an_older_copy_is_opened_and_said_so(store: Path) -> None:
    copy = store.read_bytes()
    for epoch in (2, 3):
        keeper = SqliteKeeper(store)
        assert keeper.open() == epoch
        keeper.close()
    store.write_bytes(copy)
    found = Found(store)
    assert (found.whole, found.counts) == (written(), {"age": 1})
    assert Found(store).counts == {}, "once"


WRITER = """
import sys, time
from pathlib import Path
from plait.gateway.guests.store.event_log import Change, StreamKey
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
keeper = SqliteKeeper(Path(sys.argv[1]))
keeper.open()
for number in range(40):
    keeper.write([Change(StreamKey("session", "t", f"s{number}"), 1.0, b"x" * 3000)])
print("written", flush=True)
time.sleep(60)
"""


def killed(path: Path) -> None:
    """A gateway that is killed after 40 commits, one for each stream."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)


def test_a_killed_gateway_leaves_nothing_to_complain_of(path: Path) -> None:
    killed(path)
    found = Found(path)
    assert (len(found.whole), found.problems, found.counts) == (40, {}, {})


@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_a_wal_without_its_end_leaves_a_beginning(path: Path, how: str) -> None:
    killed(path)
    wal = Path(f"{path}-wal")
    if how == "gone":
        wal.unlink()
    elif how == "cut":
        os.truncate(wal, wal.stat().st_size // 2)
    else:
        flip(wal, 8 * (wal.stat().st_size // 2))
    found = Found(path)
    assert len(found.whole) < 40
    assert (found.problems, found.counts) == ({}, {})
