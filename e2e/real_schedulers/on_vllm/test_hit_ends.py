"""Models with windows and states: where hits end and how many blocks calls take, held against vLLM's coordinator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from inspect import signature
from typing import Any

import msgspec
import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from e2e.own_schedulers.forced_levers import ForcedLevers, LeverSettings
from e2e.real_schedulers.following import Follower
from e2e.real_schedulers.on_vllm.engine import Engine
from e2e.real_schedulers.on_vllm.fixtures import Build
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.backends.vllm.calls import vllm_call
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain, root_hash, whole_hash
from plait.policy.scheduling.in_order import HitRatio
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan


def window(tokens: int, block_tokens: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, sliding_window=tokens
    )


def state(block_tokens: int = 16) -> MambaSpec:
    return MambaSpec(block_size=block_tokens, shapes=((4, 16),), dtypes=(torch.float32,), mamba_cache_mode="align")


class Comparing(ForcedLevers):
    """Compares the facts of each call with what vLLM's coordinator says. Often preempts a call."""

    engine: Engine

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The plan of the inner scheduler."""
        manager = self.engine.scheduler.kv_cache_manager
        for call in waiting:
            blocks, found_tokens, *_ = manager.get_computed_blocks(self.engine.scheduler.requests[call.call_id])
            assert facts.cached_tokens(call) == found_tokens
            self._compare(call, blocks.blocks, found_tokens, facts)
        for call in running:
            self._compare(call, manager.empty_kv_cache_blocks.blocks, call.computed_tokens, facts)
        return super().plan(now_s, waiting, running, facts)

    def _compare(self, call: LocalCall, blocks: Any, computed_tokens: int, facts: EngineFacts) -> None:
        coordinator = self.engine.scheduler.kv_cache_manager.coordinator
        coordinator.new_step_starts()
        left = call.prompt_tokens + call.output_tokens - computed_tokens
        for new_tokens in sorted({1, min(left, 100), left}):
            tokens = computed_tokens + new_tokens
            counted = {
                "num_local_computed_tokens": computed_tokens,
                "prefill_end": call.prompt_tokens + max(0, call.output_tokens - 1),
            }
            counts = coordinator.get_num_blocks_to_allocate
            expected = counts(
                request_id=call.call_id,
                num_tokens=tokens,
                new_computed_blocks=blocks,
                num_encoder_tokens=0,
                total_computed_tokens=computed_tokens,
                num_tokens_main_model=tokens,
                **{name: counted[name] for name in signature(counts).parameters if name in counted},
            )
            assert facts.blocks_needed(call, new_tokens) == expected


MODELS = {
    "window": (16, [window(100)]),
    "windows": (16, [window(40), window(300), window(40), window(16)]),
    "large blocks": (64, [window(100, 32)]),
    "small blocks": (32, [window(300, 64), window(64, 64)]),
    "state": (64, [state(64)]),
    "state and window": (32, [state(32), window(90, 32)]),
}


@pytest.mark.parametrize("interval", [0, None, 192])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_hits_end_where_the_coordinator_says(build: Build, model: str, interval: int | None, seed: int) -> None:
    block_tokens, groups = MODELS[model]
    policy = Comparing(HitRatio(), LeverSettings(preempt_every_iterations=9))
    policy.engine = engine = build(
        policy,
        blocks=1 + (1 + len(groups)) * 2000 // block_tokens,
        block_tokens=block_tokens,
        groups=groups,
        interval=interval,
        max_batch_tokens=300,
    )
    follow(engine, seed)
    assert engine.driver.preemptions


def follow(engine: Engine, seed: int, operations: int = 170) -> None:
    dice, coordinator = random.Random(seed), engine.scheduler.kv_cache_manager.coordinator
    shared = [[dice.randrange(1000) for _ in range(dice.randrange(600))] for _ in range(3)]
    names: list[str] = []
    follower, hits = Follower(engine), 0
    for _ in range(operations):
        for _ in range(dice.choice((0, 0, 1, 2))):
            own = [dice.randrange(1000) for _ in range(dice.randrange(1, 150))]
            names.append(engine.add([*dice.choice(shared)[: dice.choice((300, 600))], *own], dice.randrange(1, 150)))
        if names and dice.random() < 0.15:
            engine.abort(dice.choice(names))
        if dice.random() < 0.02:
            for name in names:
                engine.abort(name)
            engine.step()
            assert engine.empty_cache()
        engine.step()
        if dice.random() < 0.1:
            follower.follow()
            assert follower.ends | follower.inside == names_of_ends(engine)
        for name in dice.sample(names, min(len(names), 5)):
            request = engine.requests[name]
            most = dice.choice((request.num_tokens, dice.randrange(request.num_tokens)))
            found = coordinator.find_longest_cache_hit(request.block_hashes, most)[1]
            ends = engine.driver.observer.ends
            assert ends is not None
            assert ends.deepest(request.block_hashes, most, dice.randrange(600)) == found
            hits += found > 0
    assert hits


def names_of_ends(engine: Engine) -> set[int]:
    """The names of all places at which hits can end, of all that the engine was ever sent."""
    ends, found = engine.driver.observer.ends, set[int]()
    assert ends is not None
    for request in engine.requests.values():
        tokens, most = list(request.all_token_ids), request.num_tokens
        path = chain(tokens, TREE_BLOCK_TOKENS, root_hash("tiny"))
        while end := ends.deepest(request.block_hashes, most):
            most, (blocks, rest) = end - 1, divmod(end, TREE_BLOCK_TOKENS)
            if blocks and (not rest or 0 < ends.interval_tokens <= TREE_BLOCK_TOKENS):
                found.add(path[blocks - 1])
            elif blocks:
                found.add(whole_hash(tokens[end - rest : end], path[blocks - 1]))
    return found


@pytest.mark.parametrize("interval", [0, None, 192])
@pytest.mark.parametrize("model", MODELS)
def test_a_follower_waits_for_what_its_leader_will_leave(build: Build, model: str, interval: int | None) -> None:
    block_tokens, groups = MODELS[model]
    engine = build(blocks=20_000, block_tokens=block_tokens, groups=groups, interval=interval, max_batch_tokens=2_000)
    dice, facts, gained = random.Random(1), engine.planner.facts, 0
    shared = [[dice.randrange(1000) for _ in range(800)] for _ in range(4)]
    for number in range(60):
        prompts = [[*dice.choice(shared)[: dice.choice((0, 333, 800))], *range(dice.randrange(300))] for _ in range(2)]
        follower = vllm_call(engine.request([*prompts[0], 7]), EngineAnnotations(), 0.0, number)
        leader = engine.requests[engine.add([*prompts[dice.randrange(2)], 8], 1)].plait_call
        if dice.random() < 0.3:
            engine.scheduler.requests[leader.call_id].sampling_params.max_tokens = 2
            engine.step()
            leader.follow_running(engine.requests[leader.call_id])
            if leader.call_id not in engine.scheduler.requests:
                continue
        before = facts.cached_tokens(follower)
        found = max(before, facts.shared_tokens(follower, leader))
        engine.run()
        assert facts.cached_tokens(follower) == found or ("state" in model and facts.cached_tokens(follower) > found)
        gained += found > before
    assert gained


@pytest.mark.parametrize("interval", [0, None])
def test_ends_make_a_report_hardly_longer(build: Build, interval: int | None) -> None:
    groups = [window(tokens) for tokens in (128, 512, 1_024, 4_096)]
    engine = build(blocks=8_192, groups=groups, interval=interval, max_batch_tokens=2_048)
    dice = random.Random(1)
    shared = [[dice.randrange(1000) for _ in range(dice.randrange(500, 2_000))] for _ in range(5)]
    for _ in range(40):
        engine.add([*dice.choice(shared), *(dice.randrange(1000) for _ in range(dice.randrange(50, 700)))], 100)
    engine.run()
    state = engine.report(None, None)
    assert state.ends is not None
    assert state.ends.opened
    without = msgspec.structs.replace(state, ends=None)
    assert len(msgspec.msgpack.encode(state)) < 1.3 * len(msgspec.msgpack.encode(without))
