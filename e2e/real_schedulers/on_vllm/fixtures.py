"""Builds engines on vLLM's synchronous and on its asynchronous scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from e2e.real_schedulers.on_vllm.engine import Engine, Setup
from plait.policy.scheduling.plan import LocalScheduler


class Build(Protocol):
    """Builds an engine. `changes` are fields of `Setup`."""

    def __call__(
        self, policy: LocalScheduler | None = None, *, plait: Mapping[str, Any] | None = ..., **changes: Any
    ) -> Engine: ...


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Build:
    """Engines on one of the two schedulers."""

    def build_engine(policy: LocalScheduler | None = None, **changes: Any) -> Engine:
        return Engine(Setup(folder=tmp_path, asynchronous=request.param, **changes), policy)

    return build_engine
