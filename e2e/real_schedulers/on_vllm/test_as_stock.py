"""Without annotations the plugin changes nothing but the order of admission, and with `fcfs` not even that."""

from __future__ import annotations

import pytest

from e2e.real_schedulers.on_vllm.fixtures import Build
from e2e.real_schedulers.plans import Chaos
from e2e.real_schedulers.workloads import answers_so_far, one_a_step, shared_prefixes
from plait.policy.scheduling.local_scheduler import SCHEDULERS


@pytest.mark.parametrize("blocks", [400, 80], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(8))
def test_fcfs_schedules_what_stock_vllm_schedules(build: Build, blocks: int, seed: int) -> None:
    stock, planned = (build(plait=plait, blocks=blocks) for plait in (None, {"scheduler": "fcfs"}))
    expected, steps = (
        shared_prefixes(engine, seed, most=500, arrivals=(0, 0, 1, 2, 5), aborted=0.1) for engine in (stock, planned)
    )
    assert steps == expected
    assert planned.tokens == stock.tokens


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_breaks_an_engine_that_has_to_preempt(build: Build, seed: int) -> None:
    engine = build(Chaos(seed), blocks=80)
    answers = one_a_step(engine, seed)
    assert engine.tokens == answers
    assert engine.pool.get_num_free_blocks() == 80 - 1
    assert engine.driver.preemptions


@pytest.mark.parametrize("policy", SCHEDULERS)
@pytest.mark.parametrize("seed", range(4))
def test_every_policy_ends_every_call_with_its_output_in_few_blocks(build: Build, policy: str, seed: int) -> None:
    engine = build(plait={"scheduler": policy}, blocks=80)
    shared_prefixes(engine, seed, most=500, arrivals=(0, 0, 1, 2, 5), aborted=0.1)
    assert engine.tokens == answers_so_far(engine)
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running


def test_cached_calls_go_first_with_hit_ratio(build: Build) -> None:
    engine = build(plait={"scheduler": "hit_ratio"}, max_batch_tokens=64)
    shared = [position % 1000 for position in range(480)]
    engine.add(shared, 1)
    engine.run()
    for number in range(3):
        engine.add([500 + number * 100 + position for position in range(100)], name=f"cold-{number}")
        engine.add([*shared, number], name=f"warm-{number}")
    assert engine.step() == {"warm-0": 1, "warm-1": 1, "warm-2": 1, "cold-0": 61}
