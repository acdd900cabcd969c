"""Without annotations the plugin changes nothing but the order of admission, and with `fcfs` not even that."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from e2e.vllm.unit.engine import Build, Engine
from plait.policy.scheduling.local_scheduler import SCHEDULERS, EngineFacts, LocalCall, Plan


def workload(engine: Engine, seed: int) -> list[dict[str, int]]:
    """Calls that share prefixes arrive, run and are aborted at random; the same for every engine."""
    dice = random.Random(seed)
    prefixes = [[dice.randrange(1000) for _ in range(dice.randrange(300))] for _ in range(4)]
    steps, names = [], []
    for _ in range(40):
        for _ in range(dice.choice((0, 0, 1, 2, 5))):
            own = [dice.randrange(1000) for _ in range(dice.randrange(1, 200))]
            shared = dice.choice(prefixes)
            names.append(engine.add([*shared, *own], dice.randrange(1, 30)))
        if names and dice.random() < 0.1:
            engine.abort(dice.choice(names))
        steps.append(engine.step())
    return steps + engine.run()


@pytest.mark.parametrize("blocks", [400, 80], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(8))
def test_fcfs_schedules_what_stock_vllm_schedules(build: Build, blocks: int, seed: int) -> None:
    stock, planned = (build(plait=plait, blocks=blocks) for plait in (None, {"scheduler": "fcfs"}))
    expected = workload(stock, seed)
    assert workload(planned, seed) == expected
    assert planned.tokens == stock.tokens


@pytest.mark.parametrize("policy", SCHEDULERS)
@pytest.mark.parametrize("seed", range(4))
def test_every_policy_ends_every_call_with_the_stock_output(build: Build, policy: str, seed: int) -> None:
    stock, planned = (build(plait=plait, blocks=80) for plait in (None, {"scheduler": policy}))
    workload(stock, seed)
    workload(planned, seed)
    ended = [name for name, tokens in planned.tokens.items() if len(tokens) == len(stock.tokens[name])]
    assert all(planned.tokens[name] == stock.tokens[name] for name in ended)
    assert len(ended) >= len(stock.tokens) - 8, "aborted calls got as far as they got"
    assert not planned.scheduler.waiting
    assert not planned.scheduler.running


def test_cached_calls_go_first_with_hit_ratio(build: Build) -> None:
    engine = build(plait={"scheduler": "hit_ratio"}, max_batch_tokens=64)
    shared = [position % 1000 for position in range(480)]
    engine.add(shared, 1)
    engine.run()
    for number in range(3):
        engine.add([500 + number * 100 + position for position in range(100)], name=f"cold-{number}")
        engine.add([*shared, number], name=f"warm-{number}")
    assert engine.step() == {"warm-0": 1, "warm-1": 1, "warm-2": 1, "cold-0": 61}


class Chaos:
    """Plans that no sane policy makes: any order, any chunks, any calls held back or preempted."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        del now_s
        dice, calls = self.dice, [*running, *waiting]
        dice.shuffle(calls)
        victims = [call for call in running if dice.random() < 0.05]
        named = [call for call in calls if call not in victims and dice.random() < 0.8]
        cut = dice.randrange(len(named) + 1)
        picks = tuple((call, dice.randrange(1, facts.max_batch_tokens)) for call in named[:cut])
        budget = dice.choice((None, None, 1, 40, 10_000))
        return Plan(tuple(victims), picks, tuple(named[cut:]), budget)


@pytest.mark.parametrize("blocks", [400, 80], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(8))
def test_no_plan_breaks_the_engine_or_changes_a_token(build: Build, blocks: int, seed: int) -> None:
    engine = build(Chaos(seed), blocks=blocks)
    dice = random.Random(seed)
    shared = [dice.randrange(1000) for _ in range(250)]
    expected = {}
    for number in range(30):
        own = [dice.randrange(1000) for _ in range(dice.randrange(1, 150))]
        tokens, output_tokens = [*shared[: dice.randrange(250)], *own], dice.randrange(1, 25)
        name = engine.add(tokens, output_tokens, name=f"call-{number:02}")
        expected[name] = [(7 * (len(tokens) + position) + len(name)) % 1000 for position in range(output_tokens)]
        engine.step()
    engine.run(limit=10_000)
    assert engine.tokens == expected
    assert engine.pool.get_num_free_blocks() == blocks - 1
    assert engine.driver.preemptions
