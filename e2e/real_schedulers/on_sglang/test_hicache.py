"""What is reported of host memory is what SGLang's own tree has there, with each write policy of HiCache.

A process has one scheduler. So these tests run in processes of their own, which the first test starts.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.real_schedulers.following import Follower, follow_a_workload
from e2e.real_schedulers.on_sglang.fixtures import Build
from e2e.real_schedulers.on_sglang.transfers import COPIED, HICACHE, LOAD, TRANSFERS, EndOfTransfer
from e2e.real_schedulers.workloads import prompt, shared_prefixes
from plait.backends.adapter.required_names import load
from tests.waiting import WITHIN_S

with_hicache = pytest.mark.skipif(HICACHE not in os.environ, reason="in processes of their own")


@pytest.mark.skipif(HICACHE in os.environ, reason="this is one of these processes")
@pytest.mark.skipif(load(TRANSFERS) is None, reason="versions without this module copy pages in many places")
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_with_each_write_policy(policy: str) -> None:
    configuration = Path(__file__).parents[1] / "pytest.ini"
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(configuration), __file__]
    ended = subprocess.run(
        command, env={**os.environ, HICACHE: policy}, check=False, capture_output=True, text=True, timeout=5 * WITHIN_S
    )
    assert ended.returncode == 0, ended.stdout[-8000:]


@with_hicache
@pytest.mark.parametrize("patience", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_tiers_equal_what_sglang_holds(build: Build, seed: int, patience: float) -> None:
    engine = build()
    EndOfTransfer.dice, EndOfTransfer.patience = random.Random(seed), patience
    follow_a_workload(engine, seed)
    (host,) = engine.report(None, None).tiers
    assert (host.tier, host.total_blocks) == (
        "host",
        engine.scheduler.tree_cache.cache_controller.mem_pool_host.size // 16,
    )
    assert host.stored


@with_hicache
def test_a_call_brings_its_prefix_back(build: Build) -> None:
    engine, loads = build(), COPIED[LOAD]
    EndOfTransfer.patience = 0.0
    follower = Follower(engine)
    for seed in (1, 1, 1, *range(2, 16), 1):
        engine.add(prompt(300, seed), 1)
        engine.run()
        follower.check()
    assert COPIED[LOAD] > loads


@with_hicache
def test_an_emptied_cache_is_empty_in_each_tier(build: Build) -> None:
    engine = build()
    follower = Follower(engine)
    shared_prefixes(engine, 0, most=500, arrivals=(0, 0, 1, 2, 5))
    follower.check()
    assert follower.known
    assert engine.empty_cache()
    follower.check()
    assert (follower.known, follower.below) == ({}, {"host": {}})


@with_hicache
def test_salted_calls_have_chains_of_their_own(build: Build) -> None:
    engine = build()
    follower = Follower(engine)
    same = [position % 997 for position in range(200)]
    for salt in (None, "tenant-a", "tenant-b"):
        engine.add(same, 2, salt=salt)
        engine.run()
        follower.check()
    shared_prefixes(engine, 1, most=500, arrivals=(0, 0, 1, 2, 5))
    follower.check()


def test_an_engine_without_it_reports_no_host_memory(build: Build) -> None:
    if HICACHE not in os.environ:
        assert build().report(None, None).tiers == []
