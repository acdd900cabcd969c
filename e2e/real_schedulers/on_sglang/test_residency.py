"""What is reported as cached is what SGLang's radix cache finds, through stores, evictions and resets."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from e2e.sglang.unit.engine import KV_TOKENS, PAGE_TOKENS, Build, Engine
from plait.backends.protocol.cache_state import CacheState
from plait.policy.prefix.block_hash import chain, root_hash

TREE_BLOCK = 64


class Follower:
    """Follows the reports as the gateway does. `known` has the tree blocks with their parents."""

    def __init__(self, engine: Engine) -> None:
        self.known: dict[int, int | None] = {}
        self._engine = engine
        self._cursor: int | None = None
        self._epoch: str | None = None

    def follow(self) -> CacheState:
        state = self._engine.driver.report(self._cursor, self._epoch)
        if state.snapshot:
            self.known.clear()
        for gone in state.removed:
            self.known.pop(gone, None)
        for run in state.stored:
            for parent, block in zip([run.parent, *run.hashes], run.hashes, strict=False):
                self.known[block] = parent
        self._cursor, self._epoch = state.cursor, state.epoch
        return state


def check(engine: Engine, follower: Follower) -> None:
    """Compare the reported blocks with those that the cache finds of all sequences that it was ever sent."""
    state = follower.follow()
    found: dict[int, int | None] = {}
    for request in engine.requests.values():
        tokens = [*request.origin_input_ids, *request.output_ids]
        blocks = chain(tokens, TREE_BLOCK, root_hash("tiny", request.cache_salt or ""))
        hit = cached_tokens(engine, request, tokens) // TREE_BLOCK
        found.update(zip(blocks[:hit], [None, *blocks], strict=False))
    assert follower.known == found
    allocator, cache = engine.scheduler.token_to_kv_pool_allocator, engine.scheduler.tree_cache
    free, cached = allocator.available_size() // PAGE_TOKENS, cache.evictable_size() // PAGE_TOKENS
    assert (state.kv.total_blocks, state.kv.free_blocks, state.kv.cached_blocks) == (
        KV_TOKENS // PAGE_TOKENS,
        free,
        cached,
    )


def cached_tokens(engine: Engine, request: Any, tokens: list[int]) -> int:
    """How many of a sequence's tokens SGLang's own cache finds."""
    key = RadixKey(token_ids=array("q", tokens), extra_key=request.extra_key, cache_salt=request.cache_salt)
    return int(engine.scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len)


@pytest.mark.parametrize("seed", range(4))
def test_reports_equal_the_cache_through_any_workload(build: Build, seed: int) -> None:
    dice = random.Random(seed)
    engine = build()
    follower = Follower(engine)
    shared = [[dice.randrange(1000) for _ in range(dice.randrange(400))] for _ in range(3)]
    names, most = [], 0
    for _ in range(120):
        for _ in range(dice.choice((0, 0, 1, 2))):
            own = [dice.randrange(1000) for _ in range(dice.randrange(1, 150))]
            prefix = dice.choice(shared)[: dice.randrange(400)]
            names.append(engine.add([*prefix, *own], dice.randrange(1, 150)))
        if names and dice.random() < 0.15:
            engine.abort(f"{dice.choice(names)}")
        engine.step()
        if dice.random() < 0.3:
            check(engine, follower)
            most = max(most, len(follower.known))
    engine.run()
    check(engine, follower)
    assert sum(len(request.origin_input_ids) for request in engine.requests.values()) > 2 * KV_TOKENS, "some must go"
    assert most


def test_a_flushed_cache_is_reported_empty(build: Build) -> None:
    engine = build()
    follower = Follower(engine)
    for _ in range(2):
        engine.add([position % 997 for position in range(300)], 3)
        engine.run()
        check(engine, follower)
        assert len(follower.known) == 4
        assert engine.scheduler.flush_cache(empty_cache=False)
        engine.requests.clear()
        check(engine, follower)
        assert not follower.known


def test_salted_calls_have_chains_of_their_own(build: Build) -> None:
    engine = build()
    follower = Follower(engine)
    same = [position % 997 for position in range(200)]
    for salt in (None, "tenant-a", "tenant-b"):
        engine.add(same, 2, salt=salt)
        engine.run()
        check(engine, follower)
    assert len(follower.known) == 9
    assert len([block for block, parent in follower.known.items() if parent is None]) == 3


def test_a_waiting_call_finds_cached_what_is_reported(build: Build) -> None:
    engine = build()
    same = [position % 997 for position in range(300)]
    engine.add(same, 2)
    engine.run()
    name = engine.add([*same, 5], 1)
    assert engine.step() == {name: 301 - 288}, "all whole pages are found"
    call = engine.requests[name].plait_call
    assert engine.driver._facts.stored_tokens(call) == 256, "of which the whole tree blocks are known"
