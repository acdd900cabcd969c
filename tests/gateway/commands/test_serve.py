"""`plait serve` with several workers: each has a store of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.gateway.commands.serve import _check_store, _of_worker
from plait.gateway.config.sections import Config, StoreConfig


def test_each_worker_has_a_store_of_its_own(tmp_path: Path) -> None:
    config = Config(store=StoreConfig(path=str(tmp_path / "s.db")))
    assert _of_worker(config, 1, 3).store.path == str(tmp_path / "s.db.1-of-3")
    assert _of_worker(Config(), 1, 3) == Config()


@pytest.mark.parametrize(
    ("written", "workers", "is_right"),
    [
        (["s.db", "s.db-wal"], 1, True),
        (["s.db"], 2, False),
        (["s.db.0-of-2", "s.db.1-of-2-wal", "s.db.1-of-2"], 2, True),
        (["s.db.0-of-2"], 3, False),
        (["s.db.0-of-2"], 1, False),
        (["other.db.0-of-2", "s.db.0-of-2.corrupt-17", "s.db.1-of-2.lock"], 3, True),
        ([], 3, True),
    ],
)
def test_another_number_of_workers_is_refused(
    written: list[str], workers: int, *, is_right: bool, tmp_path: Path
) -> None:
    for name in written:
        (tmp_path / name).touch()
    config = Config(store=StoreConfig(path=str(tmp_path / "s.db")))
    if is_right:
        _check_store(config, workers)
    else:
        with pytest.raises(ValueError, match="another number of workers"):
            _check_store(config, workers)
