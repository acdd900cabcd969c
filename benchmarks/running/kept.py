"""The results of finished tasks in a file, so that a run that was cut off goes on from them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Generic, TypeVar

TaskT = TypeVar("TaskT")
FoundT = TypeVar("FoundT")


class Kept(Generic[TaskT, FoundT]):
    """Results by task in `path`, if there is one. `made_with` says how they came about; others are not read.

    The file is pickled, one record a task, and only ever the work of this class: do not read one that is not yours.
    """

    def __init__(self, path: Path | None, made_with: str) -> None:
        self._path = path
        self._made_with = made_with

    def read(self) -> dict[TaskT, FoundT]:
        """All results. Raises SystemExit if they were made with other options. A record that was cut off is dropped."""
        found: dict[TaskT, FoundT] = {}
        if self._path is None or not self._path.exists():
            return found
        whole = 0
        with self._path.open("rb") as file:
            while True:
                try:
                    made_with, task, result = pickle.load(file)  # noqa: S301 - written by `add`
                except (EOFError, pickle.UnpicklingError):
                    break
                if made_with != self._made_with:
                    raise SystemExit(f"{self._path} has the results of other options: {made_with}")
                found[task] = result
                whole = file.tell()
        with self._path.open("r+b") as file:
            file.truncate(whole)
        return found

    def add(self, task: TaskT, result: FoundT) -> None:
        """Keep the result of a task."""
        if self._path is not None:
            with self._path.open("ab") as file:
                pickle.dump((self._made_with, task, result), file)
