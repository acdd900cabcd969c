"""`plait serve`: several workers have a store each, and a server loads only what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plait.gateway.cli import main
from plait.gateway.commands.serve import _of_worker, check_store
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
        check_store(config, workers)
    else:
        with pytest.raises(ValueError, match="another number of workers"):
            check_store(config, workers)


def test_a_server_does_not_load_what_few_need() -> None:
    program = "import sys, plait.gateway.commands.serve; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "structlog" in loaded
    assert loaded.isdisjoint({"rich", "jsonpath_rfc9535", "re2", "httpx", "transformers", "psycopg"})


@pytest.mark.parametrize("place", ["missing/found.toml", "file/found.toml"])
def test_a_file_that_cannot_be_saved_is_refused_before_the_engines_are_asked(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("plait.gateway.commands.serve.configure_logging", lambda *_words: None)
    monkeypatch.setattr("signal.signal", lambda *_words: None)
    assert main(["serve", "http://127.0.0.1:9", "--save", str(tmp_path / place)]) == 2
    said = f"plait: --save {tmp_path / place}: {(tmp_path / place).parent} is no folder that this user can write to\n"
    assert capsys.readouterr().err == said
