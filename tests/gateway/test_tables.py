"""Guests' tables, whose database may stop answering although its machine still takes connections."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from plait.gateway import tables
from plait.gateway.tables import Database, Tables, TablesError, TablesThread, UncertainError, in_sqlite
from tests.waiting import WITHIN_S


class LostError(Exception):
    pass


class Cursor:
    description = None


class Connection:
    """What is asked for in `asked`. A statement `stuck` is not answered until the connection is cut."""

    def __init__(self, asked: list[str], stuck: str) -> None:
        self.cut = threading.Event()
        self._asked = asked
        self._stuck = stuck

    def execute(self, statement: str, *_: object) -> Cursor:
        if self.cut.is_set():
            raise LostError
        self._asked.append(statement)
        if statement == self._stuck:
            assert self.cut.wait(WITHIN_S)
            raise LostError
        return Cursor()

    def close(self) -> None:
        pass


class Frozen(Database):
    """A database that gives no answer to one statement; `asked` are all that came."""

    def __init__(self, stuck: str) -> None:
        self.asked: list[str] = []

        def cut(connection: Any) -> None:
            connection.cut.set()

        super().__init__(
            Tables("t", 1, ()), lambda: Connection(self.asked, stuck), (LostError,), begin="BEGIN", cut=cut
        )

    def work(self) -> int:
        with self.transaction() as run:
            run("WORK")
        return 1

    def _migrate(self) -> None:
        pass


@pytest.mark.parametrize(("stuck", "kind"), [("WORK", TablesError), ("COMMIT", UncertainError)])
async def test_work_that_gets_no_answer_fails_after_a_limit(
    monkeypatch: pytest.MonkeyPatch, stuck: str, kind: type[TablesError]
) -> None:
    """Only the commit may have been done."""
    monkeypatch.setattr(tables, "LIMIT_S", 0.01)
    database = Frozen(stuck)
    thread = TablesThread("tests", database.interrupt)
    with pytest.raises(TablesError) as caught:
        await thread.run(database.work)
    assert type(caught.value) is kind
    await thread.close(database.close)


async def test_after_a_failure_work_fails_at_once_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LIMIT_S", 0.01)
    monkeypatch.setattr(tables, "REST_S", WITHIN_S)
    database = Frozen("WORK")
    thread = TablesThread("tests", database.interrupt)
    for _ in range(3):
        with pytest.raises(TablesError):
            await thread.run(database.work)
    assert database.asked == ["BEGIN", "WORK"]
    await thread.close(database.close)


async def test_work_that_is_answered_is_not_interrupted() -> None:
    database = Frozen("nothing")
    thread = TablesThread("tests", database.interrupt)
    assert await thread.run(database.work) == 1
    assert database.asked == ["BEGIN", "WORK", "COMMIT"]
    await thread.close(database.close)


async def test_after_the_end_work_fails() -> None:
    """What runs beside calls goes on until the gateway has stopped."""
    database = Frozen("nothing")
    thread = TablesThread("tests", database.interrupt)
    await thread.close(database.close)
    with pytest.raises(TablesError):
        await thread.run(database.work)


def test_a_new_file_waits_for_another_connection_that_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE others (a BIGINT)")
    other.execute("BEGIN IMMEDIATE")  # before such a transaction SQLite refuses a WAL at once, whatever its timeout

    def let_go() -> None:
        time.sleep(0.1)
        other.execute("COMMIT")

    ends = threading.Thread(target=let_go)
    ends.start()
    database = in_sqlite(Tables("t", 1, ("CREATE TABLE IF NOT EXISTS {}t (a BIGINT)",)), path)
    with database.transaction() as run:
        assert run("PRAGMA journal_mode") == [("wal",)]
    ends.join()
    database.close()
    other.close()
