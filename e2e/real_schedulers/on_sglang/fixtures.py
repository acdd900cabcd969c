"""Builds engines on SGLang's event loops without and with overlap."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import pytest

from plait.policy.scheduling.plan import LocalScheduler

os.environ.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from e2e.real_schedulers.on_sglang.engine import Engine, Setup, build_scheduler
from e2e.real_schedulers.on_sglang.transfers import FLAGS, HICACHE, copy_nothing, made_up


class Build(Protocol):
    """Builds an engine, which ends the one before it."""

    def __call__(self, policy: LocalScheduler | None = None, *, plait: Mapping[str, Any] | None = ...) -> Engine: ...


@pytest.fixture(scope="session")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SGLang's scheduler, the only one of the process. With a write policy in the environment, it has HiCache."""
    folder, policy = tmp_path_factory.mktemp("model"), os.environ.get(HICACHE)
    if policy is None:
        return build_scheduler(folder)
    made_up()
    scheduler = build_scheduler(folder, *FLAGS, "--hicache-write-policy", policy)
    copy_nothing(scheduler.tree_cache.cache_controller.mem_pool_host)
    return scheduler


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def build(request: pytest.FixtureRequest, scheduler: Any) -> Iterator[Build]:
    """Engines on one of the two event loops."""
    engines: list[Engine] = []

    def build_engine(policy: LocalScheduler | None = None, **changes: Any) -> Engine:
        while engines:
            engines.pop().end()
        engines.append(Engine(scheduler, Setup(overlaps=request.param, **changes), policy))
        return engines[-1]

    yield build_engine
    while engines:
        engines.pop().end()
