"""An engine that has moved names: on `PYTHONPATH`, its servers find parameters called otherwise than Plait knows them.

`PLAIT_TEST_MOVED` has the names, as `module:class.function:parameter,...`. The engine itself goes on as before: it
passes the parameter by its position. The names move before Plait looks for any.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import Parameter, signature
from types import ModuleType
from typing import Final

PLAIT: Final = ("plait.backends.vllm.compatibility", "plait.backends.sglang.compatibility")
"""The first of Plait's modules that is about names."""


class _Mover(MetaPathFinder):
    """Finds no module. Moves the names as soon as Plait's own is looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname in PLAIT:
            sys.meta_path.remove(self)
            for moved in os.environ["PLAIT_TEST_MOVED"].split(","):
                _move(*moved.split(":"))
        return None


def _move(module: str, name: str, parameter: str) -> None:
    owner_name, function = name.split(".")
    owner = getattr(importlib.import_module(module), owner_name)
    original = getattr(owner, function)

    @functools.wraps(original)
    def called_otherwise(*args: object, **kwargs: object) -> object:
        return original(*args, **kwargs)

    had = signature(original)
    parameters = [
        Parameter(f"moved_{name}", one.kind) if name == parameter else one for name, one in had.parameters.items()
    ]
    called_otherwise.__signature__ = had.replace(parameters=parameters)  # type: ignore[attr-defined]
    setattr(owner, function, called_otherwise)


sys.meta_path.insert(0, _Mover())
