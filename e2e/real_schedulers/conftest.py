"""The adapters on an engine's own scheduler, without a server: collected only by a Python that has the engine.

`on_vllm` and `on_sglang` build the engines. The tests beside them hold for both, and those inside for one.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

__all__ = ["build", "scheduler"]  # the fixtures

ENGINE: Final = next((name for name in ("vllm", "sglang") if find_spec(name)), None)

if ENGINE == "vllm":
    from e2e.real_schedulers.on_vllm.fixtures import build

    collect_ignore = ["on_sglang"]
elif ENGINE == "sglang":
    from e2e.real_schedulers.on_sglang.fixtures import build, scheduler

    collect_ignore = ["on_vllm"]
else:
    collect_ignore_glob = ["*"]


def pytest_report_header() -> str:
    spec = find_spec(ENGINE) if ENGINE else None
    return f"{ENGINE} from {spec.origin}" if spec else "e2e/real_schedulers needs the Python of an engine"
