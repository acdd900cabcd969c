"""A power cut: `normal` keeps a beginning of what was acknowledged, and `full` all of it. Neither file is corrupt."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
from tests.gateway.guests.store.power_loss import COMPILER, Journal, journal_of

pytestmark = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="the model of a disk needs a C compiler and Linux"
)

VALUES = 40
WRITER = """
import os
from pathlib import Path
from plait.gateway.guests.store.event_log import Change, StreamKey
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
folder = Path({folder!r})
keeper = SqliteKeeper(folder / "plait.db", {synchronous!r})
keeper.open()
keeper._database.execute("PRAGMA wal_autocheckpoint = 40")
told = os.open(folder / "told", os.O_CREAT | os.O_RDWR)
for number in range({values}):
    keeper.write([Change(StreamKey("k", "t", "one"), 0.0, b"%d:" % number + bytes(5000))])
    os.pwrite(told, b"x", number)
os._exit(0)
"""


def lost(journal: Journal, folder: Path, seed: int | None) -> list[int]:
    """How many acknowledged values are not there, for power cuts at many moments."""
    moments = range(40, len(journal.entries), 13)
    found = []
    for moment in moments:
        place = folder / str(moment)
        journal.after(moment, place, None if seed is None else random.Random(f"{seed}-{moment}"))
        told = sum(entry.name == "told" for entry in journal.entries[:moment])
        keeper = SqliteKeeper(place / "plait.db")
        keeper.open()
        values = [change.data or b"" for stream in keeper.read() for change in stream.events]
        keeper.close()
        assert [int(value.split(b":")[0]) for value in values] == list(range(len(values))), "a beginning"
        assert not list(place.glob("*.corrupt-*"))
        found.append(max(0, told - len(values)))
    return found


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("synchronous", ["normal", "full"])
def test_what_a_power_cut_leaves(tmp_path: Path, synchronous: str, seed: int | None) -> None:
    folder = tmp_path / "store"
    journal = journal_of(WRITER.format(folder=str(folder), synchronous=synchronous, values=VALUES), folder, tmp_path)
    assert sum(entry.name == "told" for entry in journal.entries) == VALUES
    cuts = tmp_path / "cuts"
    cuts.mkdir()
    missing = lost(journal, cuts, seed)
    if synchronous == "full":
        assert set(missing) == {0}
    elif seed is None:
        assert max(missing) > 0, "normal promises the process's end only"
