"""The accounts' database: nothing is counted twice, and no more is leased than there is."""

import sqlite3
import stat
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway import tables
from plait.gateway.guests.account.books import (
    COUNTS,
    DAY_S,
    KEPT_DAYS,
    SILENT_S,
    TABLES,
    Books,
    ClosedEpochError,
    UsageKey,
)
from plait.gateway.tables import TablesError

ROW = UsageKey(20_000, "blue", "key_1", "demo", batch=False)
NOW_S = 20_000.0 * DAY_S


def books_in(path: Path | None) -> Books:
    return Books(tables.in_sqlite(TABLES, path))


def counts(requests: int) -> tuple[int, ...]:
    return tuple(requests * (place + 1) for place in range(len(COUNTS)))


def test_totals_replace_those_before() -> None:
    books = books_in(None)
    for number, requests in enumerate((3, 5), 1):
        books.write("one", number, {ROW: counts(requests)}, {}, NOW_S)
    books.write("one", 2, {ROW: counts(5)}, {}, NOW_S)  # the same again: its answer was lost
    books.write("two", 1, {ROW: counts(2)}, {}, NOW_S)
    assert books.used(20_000, 20_001) == {ROW: counts(7)}
    assert books.used(20_001, 20_002) == {}
    assert books.used(20_000, 20_001, "red") == {}


def test_a_closed_epoch_says_what_it_has() -> None:
    books = books_in(None)
    books.write("one", 1, {ROW: counts(3)}, {}, NOW_S)
    books.close_epochs(NOW_S + 2 * SILENT_S)
    assert books.used(20_000, 20_001) == {ROW: counts(3)}
    with pytest.raises(ClosedEpochError) as closed:
        books.write("one", 2, {ROW: counts(4)}, {}, NOW_S + 2 * SILENT_S)
    assert closed.value.number == 1
    assert books.used(20_000, 20_001) == {ROW: counts(3)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()), max_size=30))
def test_the_sum_of_all_epochs_is_what_was_used(steps: list[tuple[str, int, bool]]) -> None:
    """Against an oracle: each writer adds to its total, and goes on in a new epoch if its own was closed."""
    books, totals, epochs, written = books_in(None), Counter[str](), Counter[str](), Counter[str]()
    for number, (writer, more, closes) in enumerate(steps, 1):
        totals[writer] += more
        try:
            books.write(f"{writer}{epochs[writer]}", number, {ROW: counts(totals[writer] - written[writer])}, {}, NOW_S)
        except ClosedEpochError:
            epochs[writer], written[writer] = epochs[writer] + 1, totals[writer] - more
            books.write(f"{writer}{epochs[writer]}", number, {ROW: counts(more)}, {}, NOW_S)
        if closes:
            books.close_epochs(NOW_S, f"{writer}{epochs[writer]}")
    assert books.used(0, 30_000) == ({ROW: counts(totals.total())} if steps else {})


def test_old_use_is_forgotten() -> None:
    books = books_in(None)
    books.write("one", 1, {ROW: counts(3)}, {}, NOW_S)
    books.close_epochs(NOW_S + (KEPT_DAYS + 1) * DAY_S)
    assert books.used(0, 30_000) == {}


def test_leases_are_forgotten_once_their_day_or_month_is_long_over() -> None:
    books = books_in(None)
    periods = ["2024-08", "2024-08-23", "2024-09-30", "2024-10", "2024-10-04"]  # NOW_S is the 4th of October
    for period in periods:
        books.lease("tenant blue tokens", period, 7, 100)
    books.close_epochs(NOW_S)
    assert [books.lease("tenant blue tokens", period, 0, 100)[1] for period in periods] == [0, 0, 7, 7, 7]


@given(st.lists(st.integers(-50, 120), max_size=20))
def test_no_more_is_leased_than_there_is(wanted: list[int]) -> None:
    books, leased = books_in(None), 0
    for amount in wanted:
        granted, all_leased = books.lease("tenant blue tokens", "2026-12-01", amount, 100)
        leased += granted
        assert all_leased == leased
        assert 0 <= leased <= 100
        assert granted <= max(amount, 0)
        assert leased == 100 or granted == amount or amount < 0
    assert books.lease("tenant blue tokens", "2026-12-02", 100, 100) == (100, 100)


def test_two_processes_lease_no_more_than_there_is(tmp_path: Path) -> None:
    granted = list[int]()

    def take() -> None:
        books = books_in(tmp_path / "accounts.db")
        granted.extend(books.lease("tenant blue tokens", "2026-12-01", 7, 100)[0] for _ in range(20))
        books.close()

    takers = [threading.Thread(target=take) for _ in range(2)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert sum(granted) == 100


def test_changes_of_keys_have_numbers_in_their_order() -> None:
    books = books_in(None)
    books.put_key("key_1", "aa", "{}")
    books.put_key("key_2", "bb", "{}")
    books.put_key("key_1", "aa", '{"name":"new"}')
    assert [(key.digest, key.changed) for key in books.keys(0)] == [("bb", 2), ("aa", 3)]
    assert books.keys(3) == []
    books.write("one", 1, {}, {"key_2": 77}, NOW_S)
    found = books.key("key_2")
    assert found is not None
    assert found.used_min == 77
    assert books.key("key_3") is None


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "accounts.db"
    books_in(path).keys(0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_database_that_cannot_be_used_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    path.mkdir()
    books = books_in(path)
    with pytest.raises(TablesError):
        books.keys(0)
    path.rmdir()
    assert books.keys(0) == []


def test_a_later_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    books_in(path).keys(0)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE account_version SET version = 9")
    with pytest.raises(TablesError, match="a later version of Plait"):
        books_in(path).keys(0)
