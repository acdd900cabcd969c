"""The simulator: times that can be worked out by hand, determinism, and that it drives the real parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from plait.gateway.fleet.router import Router
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.simulation.simulate import CallRecord, Prompt, SimulatedCall, Simulation
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.block_hash import root_hash
from plait.policy.types import PlacementReason
from tests.invariants import check

# 10 ms an iteration and 1 ms a new token; attention is free.
COST = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())


def prompt(tokens: Sequence[int]) -> Prompt:
    root = root_hash("m")
    return Prompt(len(tokens), HashChain(16, root, tokens), HashChain(64, root, tokens))


def run(calls: Sequence[SimulatedCall], *, policy: str = "e2", engines: int = 2) -> tuple[Router, list[CallRecord]]:
    router, fleet = Router(policy), {}
    for number in range(engines):
        name = f"engine-{number}"
        router.add_engine(name, COST)
        fleet[name] = Engine(EngineSettings(name=name, model="m", kv_tokens=16_000), COST)
    return router, Simulation(router, fleet, "m").run(calls)


def test_one_call_takes_its_prefill_and_then_a_decode_a_token() -> None:
    _, [record] = run([SimulatedCall(5.0, prompt(range(100)), 3)])
    assert record.ttft_s == pytest.approx(0.110)
    assert record.e2e_s == pytest.approx(0.110 + 2 * 0.011)
    assert (record.reason, record.cached_tokens, record.predicted_cached_tokens) == (PlacementReason.EXPLORE, 0, 0)


def test_a_shared_prefix_is_exploited_and_predicted_in_tree_blocks() -> None:
    shared = list(range(200))
    calls = [SimulatedCall(float(i), prompt([*shared, 1000 + i]), 2) for i in range(3)]
    router, records = run(calls)
    assert [record.reason for record in records] == ["explore", "exploit", "exploit"]
    assert len({record.engine_id for record in records}) == 1
    # The engine counts in blocks of 16 tokens, the prediction in blocks of 64.
    assert [record.cached_tokens for record in records] == [0, 192, 192]
    assert [record.predicted_cached_tokens for record in records] == [0, 192, 192]
    check(router)


def test_two_long_prompts_at_once_share_iterations_of_the_engines_budget() -> None:
    calls = [SimulatedCall(0.0, prompt(range(start, start + 2000)), 1) for start in (0, 5000)]
    _, records = run(calls, engines=1)
    # The first begins alone, 2,000 tokens. The second takes what is left of the next iteration, in which the first has
    # a place that is wasted since its answer has ended.
    assert [record.ttft_s for record in records] == pytest.approx([2.010, 4.031])


def test_round_robin_takes_turns() -> None:
    calls = [SimulatedCall(float(i), prompt(range(64)), 1) for i in range(4)]
    _, records = run(calls, policy="round_robin")
    assert [record.engine_id for record in records] == ["engine-0", "engine-1", "engine-0", "engine-1"]
    assert {record.reason for record in records} == {PlacementReason.ROUND_ROBIN}


def test_the_same_inputs_give_the_same_records() -> None:
    calls = [SimulatedCall(i * 0.05, prompt([i % 3] * (100 + i)), 1 + i % 7) for i in range(60)]
    assert run(calls)[1] == run(calls)[1]


def test_after_the_run_the_router_holds_what_the_engines_hold() -> None:
    calls = [SimulatedCall(i * 0.3, prompt([i % 5] * 300), 20) for i in range(40)]
    router, _ = run(calls)
    assert all(engine.view.outstanding == 0 for engine in router.engines.values())
    check(router)
