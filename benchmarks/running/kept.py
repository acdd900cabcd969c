"""The results of finished tasks in a file, so that a run that was cut off goes on from them."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, Generic, TypeVar

TaskT = TypeVar("TaskT")
FoundT = TypeVar("FoundT")

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = ("benchmarks", "policy", "backends", "gateway", "lab")


class Kept(Generic[TaskT, FoundT]):
    """Results by task in `path`, if there is one. `made_with` says how they came about.

    The file begins with that and with a hash of our sources: results of other options or other code are not read. It is
    pickled, one record a task, and only ever the work of this class: do not read one that is not yours.
    """

    def __init__(self, path: Path | None, made_with: str) -> None:
        self._path = path
        self._head = ("results", made_with, sources())

    def read(self) -> dict[TaskT, FoundT]:
        """All results. Raises SystemExit for a file of other options, of other code, or that is no such file.

        A record that was cut off is dropped.
        """
        found: dict[TaskT, FoundT] = {}
        if self._path is None or not self._path.exists():
            return found
        with self._path.open("r+b") as file:
            if next(_records(file), None) != self._head:
                raise SystemExit(f"{self._path} has no results of these options and this code: name another file")
            whole = file.tell()
            for task, result in _records(file):
                found[task], whole = result, file.tell()
            file.truncate(whole)
        return found

    def add(self, task: TaskT, result: FoundT) -> None:
        """Keep the result of a task."""
        if self._path is not None:
            is_new = not self._path.exists()
            with self._path.open("ab") as file:
                if is_new:
                    pickle.dump(self._head, file)
                pickle.dump((task, result), file)


def _records(file: IO[bytes]) -> Iterator[Any]:
    """The records of a file that are whole."""
    while True:
        try:
            yield pickle.load(file)  # noqa: S301 - written by `Kept.add`, or refused
        except Exception:  # noqa: BLE001 - what a broken record raises is anything
            return


@cache
def sources() -> str:
    """A hash of what the results depend on beside the options: our sources."""
    whole = hashlib.sha256()
    for path in sorted(file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()
