"""What is reported of host memory is what vLLM's own OffloadingConnector has there, through any history."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import vllm

from e2e.real_schedulers.following import Follower, follow_a_workload
from e2e.real_schedulers.on_vllm.engine import Engine
from e2e.real_schedulers.on_vllm.fixtures import Build
from e2e.real_schedulers.on_vllm.transfers import LOAD_S, Worker, offloading_manager, room
from e2e.real_schedulers.workloads import answers_so_far, shared_prefixes
from plait.backends.protocol.cache_state import LowerTier
from plait.backends.vllm import compatibility
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan

VERSION = tuple(int(part) for part in vllm.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION == (0, 26), reason="its connector fails on aborted calls, without Plait too")
HOST: dict[str, Any] = {"blocks": 1 + 2048 // 16, "max_batch_tokens": 256, "host_chunks": 3072 // 16}
"""An engine whose calls offload blocks, and load them again."""


class Decodes:
    """Admits no call, and has no budget for one."""

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """What runs goes on."""
        del now_s, waiting, facts
        return Plan((), tuple((call, 1) for call in running), budget_tokens=len(running))


def host_of(engine: Engine) -> LowerTier:
    (tier,) = engine.report(None, None).tiers
    assert tier.tier == "host"
    return tier


@pytest.mark.parametrize(
    ("block_tokens", "chunk_blocks"),
    [*((16, blocks) for blocks in (1, 2, 3, 4, 8)), (32, 1), (48, 2), (64, 1), (64, 2), (80, 1), (128, 1)],
)
@pytest.mark.parametrize("seed", range(2))
def test_tiers_equal_what_vllm_holds(build: Build, block_tokens: int, chunk_blocks: int, seed: int) -> None:
    engine = build(
        block_tokens=block_tokens,
        blocks=1 + 2048 // block_tokens,
        max_batch_tokens=256,
        chunk_blocks=chunk_blocks,
        host_chunks=3072 // (block_tokens * chunk_blocks),
    )
    engine.worker = Worker(random.Random(seed), patience=0.6)
    follow_a_workload(engine, seed)
    tier = host_of(engine)
    assert tier.total_blocks == room(offloading_manager(engine.scheduler.connector)) * chunk_blocks
    assert tier.loaded_tokens > 0
    assert tier.loading_s == LOAD_S * engine.worker.loaded


@pytest.mark.parametrize(
    "options",
    [{"eviction_policy": "arc"}, {"offload_prompt_only": False}, {"store_threshold": 2}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_they_do_with_any_option(build: Build, options: dict[str, Any], several: bool) -> None:
    if VERSION < (0, 30) and "offload_prompt_only" in options:
        pytest.skip("it offloads the last block of an aborted call, which was never in its cache")
    engine = build(**HOST, offloading=options, several_connectors=several)
    engine.worker = Worker(random.Random(3), patience=0.6)
    follow_a_workload(engine, 3)
    assert host_of(engine).loaded_tokens > 0


def test_an_emptied_accelerator_leaves_host_memory_as_it_is(build: Build) -> None:
    engine = build(**HOST)
    follower = Follower(engine)
    engine.add([position % 997 for position in range(300)], 3)
    engine.run()
    for _ in range(2):
        engine.step()  # the transfers end
    follower.check()
    prompt = dict(follower.known)
    assert (len(prompt), follower.below) == (4, {"host": {}})
    assert engine.scheduler.reset_prefix_cache()
    follower.check()
    assert (follower.known, follower.below) == ({}, {"host": prompt})
    engine.add([position % 997 for position in range(300)], 1)
    engine.run()
    follower.check()
    assert (follower.known, follower.below) == (prompt, {"host": {}}), "they were loaded"
    assert host_of(engine).loaded_tokens == 300 // 16 * 16
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    follower.check()
    assert (follower.known, follower.below) == ({}, {"host": {}})


@pytest.mark.parametrize("patience", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_fcfs_schedules_what_stock_vllm_schedules(build: Build, seed: int, patience: float) -> None:
    """Where blocks suffice: after a preemption, vLLM begins nothing in that step, not even a call that is loaded."""
    stock, planned = (
        build(**HOST | {"blocks": 60}, max_running=2, plait=plait) for plait in (None, {"scheduler": "fcfs"})
    )
    both = []
    for engine in (stock, planned):
        engine.worker = Worker(random.Random(seed), patience)
        both.append(shared_prefixes(engine, seed, most=300, arrivals=(0, 0, 1, 2, 5), aborted=0.1))
    assert stock.worker.loaded
    assert both[1] == both[0]
    assert planned.tokens == stock.tokens


@pytest.mark.parametrize("policy", SCHEDULERS)
@pytest.mark.parametrize("seed", range(2))
def test_every_policy_ends_every_call(build: Build, policy: str, seed: int) -> None:
    engine = build(**HOST | {"blocks": 80}, plait={"scheduler": policy})
    engine.worker = Worker(random.Random(seed), patience=0.6)
    shared_prefixes(engine, seed, most=500, arrivals=(0, 0, 1, 2, 5), aborted=0.1)
    assert engine.worker.loaded
    assert engine.tokens == answers_so_far(engine)
    assert not engine.busy


def test_a_call_that_has_loaded_begins_though_no_plan_has_it(build: Build) -> None:
    engine = build(**HOST, plait={"scheduler": "fcfs"})
    same = [position % 997 for position in range(300)]
    engine.add(same, 1)
    engine.run()
    engine.step()
    assert engine.scheduler.reset_prefix_cache()
    engine.add([position % 991 for position in range(500, 550)], 100, name="decodes")
    engine.step()
    engine.worker = Worker(patience=1.0)
    engine.add(same, 1, name="loads")
    assert engine.step() == {"decodes": 1}
    engine.planner.policy = Decodes()
    engine.add(same[200:], 1, name="waits")
    assert engine.step() == {"decodes": 1}
    engine.worker.patience = 0.0
    begun = next(step for step in (engine.step() for _ in range(5)) if "loads" in step)
    assert begun == {"decodes": 1, "loads": 1}
    assert engine.step() == {"decodes": 1, "loads": 1}
    assert engine.waiting == ["waits"]


def test_an_engine_that_lacks_a_name_reports_no_host_memory(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compatibility.OFFLOADING.methods, "vllm.v1.kv_offload.base.OffloadingManager.forget", ())
    engine = build(**HOST)
    assert engine.report(None, None).tiers == []
    name = engine.add([position % 997 for position in range(300)], 3)
    engine.run()
    assert len(engine.tokens[name]) == 3


def test_an_engine_that_offloads_nothing_reports_none(build: Build) -> None:
    assert build().report(None, None).tiers == []
