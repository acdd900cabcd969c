"""A model with sliding windows: SGLang does not tell which it drops, and yet what waiting calls find is known.

A process has one scheduler. So these tests run in processes of their own, which the first test starts: one for each of
SGLang's trees.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from e2e.real_schedulers.on_sglang.engine import TREE_BLOCK_TOKENS, WINDOW
from e2e.real_schedulers.on_sglang.fixtures import Build
from e2e.real_schedulers.workloads import answers_so_far, shared_prefixes
from plait.backends.adapter.required_names import load
from plait.backends.sglang.calls import SglangCall
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from plait.policy.scheduling.slo_scheduler import SloScheduler
from tests.waiting import WITHIN_S

CORES = "sglang.srt.mem_cache.unified_cache.tree_core_registry.registered_tree_core_backends"
TREES = "sglang.srt.mem_cache.unified_cache.tree_core_registry.create_tree_core"
CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
with_windows = pytest.mark.skipif(WINDOW not in os.environ, reason="in processes of their own")


@pytest.mark.skipif(WINDOW in os.environ, reason="this is one of these processes")
@pytest.mark.skipif(load(TREES) is None, reason="older versions run out of memory in so small a pool")
@pytest.mark.parametrize("core", ["rust", "python"])
def test_with_each_tree(core: str) -> None:
    registered = load(CORES)
    if registered is not None and core not in registered():
        pytest.skip(f"this version has no tree in {core}")
    configuration = Path(__file__).parents[1] / "pytest.ini"
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(configuration), __file__]
    variables = {**os.environ, WINDOW: "128", CORE: core}
    ended = subprocess.run(command, env=variables, check=False, capture_output=True, text=True, timeout=5 * WITHIN_S)
    assert ended.returncode == 0, ended.stdout[-8000:]


@pytest.mark.skipif(WINDOW in os.environ, reason="this is one of these processes")
def test_full_attention_is_all_told(build: Build) -> None:
    assert not build().report(None, None).untold


class Notes(SloScheduler):
    """`slo`, which notes what it is shown of each waiting call: the hit, and the leading tree blocks in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.hits: dict[str, int] = {}
        self.stored: dict[str, int] = {}

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        for call in waiting:
            self.hits[call.call_id] = facts.cached_tokens(call)
            self.stored[call.call_id] = cast("SglangCall", call).hit_blocks * TREE_BLOCK_TOKENS
        return super().plan(now_s, waiting, running, facts)


@with_windows
def test_a_waiting_call_is_known_to_find_what_it_finds(build: Build) -> None:
    policy, dice = Notes(), random.Random(1)
    engine = build(policy)
    documents = [[dice.randrange(1000) for _ in range(600)] for _ in range(6)]
    for _ in range(60):
        own = [dice.randrange(1000) for _ in range(dice.randrange(10, 120))]
        engine.add([*dice.choice(documents)[: dice.choice((300, 450, 600))], *own], 3)
        engine.run()
    found = {name: request.cached_tokens for name, request in engine.requests.items()}
    assert all(0 <= found[name] - hit < TREE_BLOCK_TOKENS for name, hit in policy.hits.items())
    assert engine.planner.diverged_picks <= sum(found[name] != hit for name, hit in policy.hits.items())
    assert sum(policy.stored.values()) > sum(found.values()) + 1_000, "windows of stored blocks were dropped"
    assert engine.report(None, None).untold.endswith("end with sliding windows")


@with_windows
@pytest.mark.parametrize("policy", SCHEDULERS)
def test_every_policy_ends_every_call(build: Build, policy: str) -> None:
    engine = build(plait={"scheduler": policy})
    shared_prefixes(engine, 0, most=500, arrivals=(0, 0, 1, 2, 5), aborted=0.1)
    assert engine.tokens == answers_so_far(engine)
    assert not engine.waiting


@with_windows
def test_pages_are_those_of_full_attention(build: Build) -> None:
    engine = build()
    shared_prefixes(engine, 0, most=500, arrivals=(0, 1, 2))
    kv = engine.report(None, None).kv
    assert kv.free_blocks + kv.cached_blocks == kv.total_blocks
