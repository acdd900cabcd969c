"""Says what a run was measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

PACKAGES: Final = ("vllm", "torch", "triton", "transformers", "tokenizers", "numpy", "pydantic", "httpx")


def described() -> Mapping[str, object]:
    """The accelerator's name, driver and memory, or `CPU`; the processors, and versions of packages."""
    return {
        "accelerator": _accelerator(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _accelerator() -> str:
    if shutil.which("nvidia-smi") is None:
        return "CPU"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    found = subprocess.run(query, check=False, capture_output=True, text=True)  # noqa: S603 - constant words
    return found.stdout.strip() or "CPU"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
