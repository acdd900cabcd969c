"""The engine is used as it was installed, and Plait as it is packaged."""

from __future__ import annotations

import base64
import csv
import hashlib
from pathlib import Path

from e2e.real_engines.engine import EngineKind
from e2e.real_engines.reference import FORCED_SCHEDULER, Reference


def site_packages(python: Path) -> Path:
    return next((python.parents[1] / "lib").glob("python3.*/site-packages"))


def digest(path: Path) -> str:
    """A file's hash as RECORD files write it."""
    with path.open("rb") as file:
        value = hashlib.file_digest(file, "sha256").digest()
    return f"sha256={base64.urlsafe_b64encode(value).rstrip(b'=').decode()}"


def test_no_file_of_the_engine_was_touched(kind: EngineKind, python: Path) -> None:
    site = site_packages(python)
    (record,) = site.glob(f"{kind.distribution}-*.dist-info/RECORD")
    with record.open(newline="") as rows:
        recorded = {path: wanted for path, wanted, _ in csv.reader(rows) if wanted}
    assert sum(path.startswith(f"{kind.package}/") for path in recorded) > 1000, "else this looks at the wrong files"
    # What an installer itself writes or rewrites: its marks beside RECORD, and scripts with the interpreter's path.
    changed = [path for path, wanted in recorded.items() if digest(site / path) != wanted]
    assert not changed
    files = (path.relative_to(site).as_posix() for path in (site / kind.package).rglob("*") if path.is_file())
    added = [path for path in files if path not in recorded and "__pycache__" not in path]
    assert not added


def test_the_wheel_runs_beside_distributions_and_files_of_its_folders_names(reference: Reference) -> None:
    assert reference.forced, "it answered"
    assert reference.scheduler == FORCED_SCHEDULER, "by the scheduler that the launcher was given"
