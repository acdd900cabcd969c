"""Stands in for SGLang's compiled kernels: names to import. With PyTorch's attention none of them is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled for an accelerator, and there is none")

    return kernel
