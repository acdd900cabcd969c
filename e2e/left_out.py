"""Runs a program where some rooms cannot be imported: `python -m e2e.left_out ROOM[,ROOM...] MODULE ARGUMENTS`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Without(MetaPathFinder):
    """Refuses to import these `rooms`, folders of the repository."""

    def __init__(self, rooms: Sequence[str]) -> None:
        self._modules = [f"plait.{room.replace('/', '.')}" for room in rooms]

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: the next finder has it."""
        if any(f"{fullname}.".startswith(f"{module}.") for module in self._modules):
            raise ImportError(f"{fullname} is left out")
        return None


if __name__ == "__main__":
    _, rooms, module, *arguments = sys.argv
    sys.meta_path.insert(0, Without(rooms.split(",")))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
