"""What is reported as cached, where it depends on vLLM's block pool."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from e2e.own_schedulers.forced_levers import ForcedLevers, LeverSettings
from e2e.real_schedulers.following import Follower, follow_a_workload
from e2e.real_schedulers.on_vllm.engine import Engine
from e2e.real_schedulers.on_vllm.fixtures import Build
from plait.backends.protocol.cache_state import CacheState
from plait.backends.vllm.plugin import MAX_WAITING
from plait.policy.scheduling.in_order import HitRatio
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan


@pytest.mark.parametrize("block_tokens", [16, 32, 48, 64, 80, 128, 208])
@pytest.mark.parametrize("seed", range(4))
def test_reports_equal_the_pool_with_blocks_of_any_size(build: Build, block_tokens: int, seed: int) -> None:
    engine = build(blocks=1 + 2048 // block_tokens, block_tokens=block_tokens, max_batch_tokens=256)
    follow_a_workload(engine, seed)
    assert engine.driver.preemptions, "the pool was too small for them"


class Comparing(ForcedLevers):
    """Compares what each waiting call is said to find cached with what vLLM finds. Often preempts a call."""

    engine: Engine

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The plan of the inner scheduler."""
        scheduler = self.engine.scheduler
        for call in waiting:
            found_tokens = scheduler.kv_cache_manager.get_computed_blocks(scheduler.requests[call.call_id])[1]
            assert facts.cached_tokens(call) == found_tokens
        return super().plan(now_s, waiting, running, facts)


@pytest.mark.parametrize("seed", range(4))
def test_waiting_calls_hit_what_vllm_finds_for_them(build: Build, seed: int) -> None:
    policy = Comparing(HitRatio(), LeverSettings(preempt_every_iterations=9))
    policy.engine = engine = build(policy, blocks=80)
    follow_a_workload(engine, seed)
    assert engine.driver.preemptions


def test_copies_of_a_block_are_one_until_the_last_has_gone(build: Build) -> None:
    engine = build(block_tokens=64, blocks=9, max_batch_tokens=128)
    follower = Follower(engine)
    same = [position % 1000 for position in range(128)]
    for _ in range(2):  # both are computed: the last token of a prompt always is, and with it its block
        engine.add(same, 1)
    engine.run()
    follower.check()
    copied = set(follower.known)
    assert len(copied) == 2
    for number in range(1, 12):
        engine.add([(position + 70 * number) % 1000 for position in range(200, 264)], 1)
        engine.run()
        follower.check()
    assert not copied & set(follower.known)


def test_a_report_is_held_back_until_something_changes(build: Build) -> None:
    engine = build()
    reports = engine.scheduler.cache_reports
    first = msgspec.msgpack.decode(reports.report(None, None, None, True), type=CacheState)
    assert first.snapshot
    waiting = [reports.report(first.cursor, first.epoch, None, True) for _ in range(MAX_WAITING + 4)]
    assert [future.done() for future in waiting] == [True] * 4 + [False] * MAX_WAITING, "who gave up does not pile up"
    engine.add([position % 997 for position in range(200)], 1)
    engine.step()
    states = [msgspec.msgpack.decode(future.result(0), type=CacheState) for future in waiting]
    assert [len(state.stored) for state in states] == [0] * 4 + [1] * MAX_WAITING
    other_epoch = msgspec.msgpack.decode(reports.report(states[-1].cursor, "other", None, True), type=CacheState)
    assert other_epoch.snapshot, "a cursor of another epoch says nothing"
