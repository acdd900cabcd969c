"""The plugin on SGLang's own classes, without a server: collected only by a Python that has SGLang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    import sglang

    from e2e.sglang.unit.engine import Build, Engine, Setup, build_scheduler


def pytest_report_header() -> str:
    return f"SGLang {sglang.__version__} from {Path(sglang.__file__).parent}"


@pytest.fixture(scope="session")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_scheduler(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def build(request: pytest.FixtureRequest, scheduler: Any) -> Iterator[Build]:
    """Builds engines on SGLang's event loops without and with overlap."""
    engines: list[Engine] = []

    def build_engine(policy: Any = None, **changes: Any) -> Engine:
        while engines:
            engines.pop().end()
        engines.append(Engine(scheduler, Setup(overlaps=request.param, **changes), policy))
        return engines[-1]

    yield build_engine
    while engines:
        engines.pop().end()
