"""What is reported as cached is what vLLM's block pool holds, whatever happened to it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from e2e.vllm.unit.engine import Build, Engine
from plait.backends.protocol.cache_state import CacheState
from plait.policy.prefix.block_hash import HashChain, root_hash


class Oracle:
    """Looks for every tree block of every prompt ever sent, by vLLM's own hashes, in vLLM's own map."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.granularity = engine.driver.observer.granularity_tokens
        self.parts: dict[int, tuple[int | None, list[bytes]]] = {}

    def sent(self, request: Any, salt: str = "") -> None:
        chain = HashChain(self.granularity, root_hash("tiny", salt), list(request.all_token_ids))
        width = self.granularity // self.engine.setup.block_tokens
        for index, tree_block in enumerate(chain.hashes):
            parts = list(request.block_hashes[index * width : (index + 1) * width])
            self.parts[tree_block] = (chain.parent(index), parts)

    def resident(self) -> set[int]:
        held = self.engine.pool.get_cached_block
        return {tree for tree, (_, parts) in self.parts.items() if all(held(part, [0]) for part in parts)}


class Follower:
    """A gateway: it knows only what the reports say."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: dict[int, int | None] = {}
        self.cursor: int | None = None
        self.epoch: str | None = None

    def follow(self) -> CacheState:
        reports = self.engine.scheduler.cache_reports
        state = msgspec.msgpack.decode(reports.report(self.cursor, self.epoch, False), type=CacheState)
        if state.snapshot:
            self.known.clear()
        for gone in state.removed:
            self.known.pop(gone, None)
        for run in state.stored:
            for parent, block in zip([run.parent, *run.hashes], run.hashes, strict=False):
                self.known[block] = parent
        self.cursor, self.epoch = state.cursor, state.epoch
        return state


def check(oracle: Oracle, follower: Follower) -> None:
    state, pool = follower.follow(), oracle.engine.pool
    assert set(follower.known) == oracle.resident()
    assert all(oracle.parts[block][0] == parent for block, parent in follower.known.items())
    free = [block for block in pool.blocks if block.ref_cnt == 0 and not block.is_null]
    cached = sum(block.block_hash is not None for block in free)
    assert state.kv == type(state.kv)(pool.num_gpu_blocks - 1, len(free) - cached, cached)
    assert state.queue.running == len(oracle.engine.scheduler.running)


def all_requests(engine: Engine) -> list[Any]:
    return list(engine.scheduler.requests.values())


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("seed", range(4))
def test_reports_equal_the_pool_through_any_workload(build: Build, block_tokens: int, seed: int) -> None:
    dice = random.Random(seed)
    engine = build(blocks=1 + 2048 // block_tokens, block_tokens=block_tokens, max_batch_tokens=256)
    oracle, follower = Oracle(engine), Follower(engine)
    shared = [[dice.randrange(1000) for _ in range(dice.randrange(400))] for _ in range(3)]
    names: list[str] = []
    for _ in range(120):
        for _ in range(dice.choice((0, 0, 1, 2))):
            own = [dice.randrange(1000) for _ in range(dice.randrange(1, 150))]
            prefix = dice.choice(shared)[: dice.randrange(400)]
            names.append(engine.add([*prefix, *own], dice.randrange(1, 250)))
        if names and dice.random() < 0.15:
            engine.abort(dice.choice(names))
        for request in all_requests(engine):
            oracle.sent(request)
        engine.step()
        for request in all_requests(engine):
            oracle.sent(request)
        if dice.random() < 0.5:
            check(oracle, follower)
    for request in all_requests(engine):
        oracle.sent(request)
    check(oracle, follower)
    assert engine.driver.preemptions, "the pool was too small for them"
    assert len(oracle.parts) > len(follower.known), "blocks were evicted"


def test_copies_of_a_block_are_one_until_the_last_has_gone(build: Build) -> None:
    engine = build(block_tokens=64, blocks=9, max_batch_tokens=128)
    oracle, follower = Oracle(engine), Follower(engine)
    same = [position % 1000 for position in range(128)]
    for _ in range(2):  # both are computed: the last token of a prompt always is, and with it its block
        engine.add(same, 1)
    for request in all_requests(engine):
        oracle.sent(request)
    engine.run()
    check(oracle, follower)
    for number in range(1, 12):
        engine.add([(position + 70 * number) % 1000 for position in range(200, 264)], 1)
        for request in all_requests(engine):
            oracle.sent(request)
        engine.run()
        check(oracle, follower)
    assert not set(follower.known) & set(list(oracle.parts)[:2])


def test_a_reset_cache_is_reported_empty(build: Build) -> None:
    engine = build()
    oracle, follower = Oracle(engine), Follower(engine)
    for round_number in range(2):
        engine.add([position % 997 for position in range(300)], 3)
        for request in all_requests(engine):
            oracle.sent(request)
        engine.run()
        check(oracle, follower)
        assert len(follower.known) == 4, round_number
        assert engine.scheduler.reset_prefix_cache()
        check(oracle, follower)
        assert not follower.known


def test_salted_calls_have_chains_of_their_own(build: Build) -> None:
    engine = build()
    oracle, follower = Oracle(engine), Follower(engine)
    same = [position % 997 for position in range(200)]
    for salt in (None, "tenant-a", "tenant-b"):
        engine.add(same, 2, salt=salt)
        for request in all_requests(engine):
            oracle.sent(request, salt or "")
        engine.run()
        check(oracle, follower)
    assert len(follower.known) == 9
    assert len({block for block, parent in follower.known.items() if parent is None}) == 3


def test_a_report_is_held_back_until_something_changes(build: Build) -> None:
    engine = build()
    reports = engine.scheduler.cache_reports
    first = msgspec.msgpack.decode(reports.report(None, None, True), type=CacheState)
    assert first.snapshot
    waiting = [reports.report(first.cursor, first.epoch, True) for _ in range(20)]
    assert [future.done() for future in waiting] == [True] * 4 + [False] * 16, "those who gave up do not pile up"
    engine.add([position % 997 for position in range(200)], 1)
    engine.step()
    states = [msgspec.msgpack.decode(future.result(0), type=CacheState) for future in waiting]
    assert [len(state.stored) for state in states] == [0] * 4 + [1] * 16
    other_epoch = msgspec.msgpack.decode(reports.report(states[-1].cursor, "other", True), type=CacheState)
    assert other_epoch.snapshot, "a cursor of another epoch says nothing"
