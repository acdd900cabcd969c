"""What an engine reports of itself is so: its block pool, its queue, and what it has cached."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Final

import pytest

from e2e.real_engines.engine import (
    KV_TOKENS,
    MAX_RUNNING_CALLS,
    MODEL,
    EngineKind,
    RealEngine,
    stored_blocks,
)
from e2e.real_engines.fleet import EngineFleet
from e2e.sdk import sync_client
from e2e.server_process import eventually
from plait.backends.protocol.cache_state import CacheState
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain, root_hash
from tests.waiting import WITHIN_S

GAUGE_STEPS: Final = 48
"""SGLang sets its gauges every 40 decode steps. For a call that ends before, they are right after half a minute."""


@pytest.fixture
def engine(fleet: EngineFleet) -> RealEngine:
    """One of the engines, which nothing else uses meanwhile."""
    return fleet.engines["engine-1"]


def cached_of(engine: RealEngine, prompt: list[int]) -> int:
    """Have a prompt computed; how many of its tokens the engine found in its cache."""
    request = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    response = engine.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    details = response.json()["usage"]["prompt_tokens_details"]
    return int((details and details["cached_tokens"]) or 0)


def expected_of(state: CacheState, prompt: list[int]) -> int:
    """How many tokens of a prompt the engine has, by its report."""
    stored, blocks = set(stored_blocks(state)), 0
    for block in chain(prompt[:-1], TREE_BLOCK_TOKENS, root_hash(MODEL)):
        if block not in stored:
            break
        blocks += 1
    return blocks * TREE_BLOCK_TOKENS


def prompts() -> Iterator[list[int]]:
    """Prompts that branch off each other, twice as many tokens as fit the cache."""
    rng = random.Random(7)
    trunks = [[rng.randrange(10, 8000) for _ in range(2200)] for _ in range(12)]
    for _ in range(60):
        trunk = rng.choice(trunks)
        yield trunk[: rng.randrange(100, 2200)] + [rng.randrange(10, 8000) for _ in range(rng.randrange(300))]


def test_it_tells_what_it_is(engine: RealEngine, kind: EngineKind) -> None:
    state = engine.cache_state()
    assert (state.engine, state.kind, state.model) == ("engine-1", kind.name, MODEL)
    assert (state.block_tokens, state.granularity_tokens) == (kind.block_tokens, TREE_BLOCK_TOKENS)
    assert state.kv.total_blocks == KV_TOKENS // kind.block_tokens - kind.kept_blocks
    assert state.scheduler.slots == MAX_RUNNING_CALLS


def test_kv_use_is_the_block_pools(engine: RealEngine, kind: EngineKind) -> None:
    """Compared with the engine's own gauge, which may be late, while a call runs, and at rest."""
    late_blocks = GAUGE_STEPS // kind.block_tokens

    def used() -> int:
        kv = engine.cache_state().kv
        return kv.total_blocks - kv.free_blocks - kv.cached_blocks

    def agrees() -> bool:
        before, gauge, after = used(), engine.used_blocks(), used()
        return before - late_blocks <= gauge <= after

    with sync_client(engine, timeout=WITHIN_S) as client:
        stream = client.completions.create(
            model=MODEL, prompt=[*range(10, 2010)], max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        assert len(list(islice(stream, GAUGE_STEPS))) == GAUGE_STEPS
        eventually(lambda: used() >= 2000 // kind.block_tokens and agrees())
        assert engine.cache_state().queue.running == 1
        stream.close()
    eventually(lambda: used() == 0 and agrees())


def test_a_report_foretells_what_the_engine_finds(engine: RealEngine, kind: EngineKind) -> None:
    """Of every prompt, while the cache keeps evicting."""
    evicted, state = 0, engine.settled_state()
    for prompt in prompts():
        expected = expected_of(engine.settled_state(), prompt)
        whole_tokens = expected // kind.block_tokens * kind.block_tokens
        assert whole_tokens <= cached_of(engine, prompt) < expected + TREE_BLOCK_TOKENS
        delta = engine.cache_state(since=state.cursor, epoch=state.epoch)
        evicted, state = evicted + len(delta.removed), delta
    assert evicted > 0


def test_changes_add_up_to_the_snapshot(engine: RealEngine, kind: EngineKind) -> None:
    state = engine.settled_state()
    assert state.snapshot
    held = set(stored_blocks(state))
    for prompt in prompts():
        cached_of(engine, prompt)
        state = engine.cache_state(since=state.cursor, epoch=state.epoch)
        assert not state.snapshot
        held = held - set(state.removed) | set(stored_blocks(state))
    snapshot = engine.settled_state()
    delta = engine.cache_state(since=state.cursor, epoch=state.epoch)
    held = held - set(delta.removed) | set(stored_blocks(delta))
    assert held == set(stored_blocks(snapshot))
    assert len(held) <= snapshot.kv.cached_blocks * -(-kind.block_tokens // TREE_BLOCK_TOKENS)
