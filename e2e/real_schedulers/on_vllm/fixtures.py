"""The plugin on vLLM's own classes, without a model: collected only by a Python that has vLLM."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import vllm

    from e2e.vllm.unit.engine import Build, Engine, Setup


def pytest_report_header() -> str:
    return f"vLLM {vllm.__version__} from {Path(vllm.__file__).parent}"


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Build:
    """Builds engines on vLLM's synchronous and on its asynchronous scheduler."""
    base = Setup(folder=tmp_path, asynchronous=request.param)
    return lambda policy=None, **changes: Engine(replace(base, **changes), policy)
