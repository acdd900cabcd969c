"""A vLLM that is not known, or not set up for it, is refused at the start, with what is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import AsyncMPClient

from e2e.real_schedulers.on_vllm.fixtures import Build
from plait.backends.adapter.required_names import UnsupportedEngineError
from plait.backends.vllm.compatibility import REQUIRED
from plait.backends.vllm.scheduler import create_scheduler


def _other_touch(self: BlockPool, block: object) -> None:
    """Takes one block, as no version does."""


def test_the_installed_version_has_every_name() -> None:
    assert REQUIRED.installed_tier("chunks") == "chunks"


def test_missing_names_are_listed(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BlockPool, "reset_prefix_cache")
    monkeypatch.setattr(BlockPool, "touch", _other_touch)
    with pytest.raises(UnsupportedEngineError) as refusal:
        build()
    message = str(refusal.value)
    assert "BlockPool.reset_prefix_cache" in message
    assert "BlockPool.touch(blocks)" in message
    assert "BlockPool.free_blocks" not in message


def test_missing_attributes_are_listed(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.__init__

    def without_requests(self: Scheduler, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        del self.requests

    monkeypatch.setattr(Scheduler, "__init__", without_requests)
    with pytest.raises(UnsupportedEngineError, match=r"Scheduler\.requests"):
        build()


def test_vllms_own_priority_order_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.__init__

    def with_priorities(self: Scheduler, vllm_config: Any, *args: object, **kwargs: object) -> None:
        vllm_config.scheduler_config.policy = "priority"
        original(self, vllm_config, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "__init__", with_priorities)
    with pytest.raises(UnsupportedEngineError, match="scheduling-policy fcfs"):
        build()


def test_a_diffusion_model_is_refused() -> None:
    config = SimpleNamespace(diffusion_config=object())
    with pytest.raises(UnsupportedEngineError, match="diffusion"):
        create_scheduler(vllm_config=config)


@pytest.mark.parametrize(("ranks", "index"), [(2, 0), (1, 1)], ids=["sparse", "dense"])
def test_several_ranks_behind_one_api_server_need_a_way_to_each(
    ranks: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = SimpleNamespace(data_parallel_size=ranks, data_parallel_index=index, data_parallel_external_lb=False)
    config = SimpleNamespace(parallel_config=parallel)
    with pytest.raises(AttributeError, match="scheduler_config"):  # the next that is read
        create_scheduler(vllm_config=config)
    monkeypatch.delattr(AsyncMPClient, "_call_utility_async")
    with pytest.raises(UnsupportedEngineError, match=r"AsyncMPClient\._call_utility_async.*--data-parallel-rank"):
        create_scheduler(vllm_config=config)
    parallel.data_parallel_external_lb = True
    with pytest.raises(AttributeError, match="scheduler_config"):
        create_scheduler(vllm_config=config)
