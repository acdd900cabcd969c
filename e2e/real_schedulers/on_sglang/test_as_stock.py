"""Without annotations the plugin changes nothing but the order of admission, and with `fcfs` not even that."""

from __future__ import annotations

import random

import pytest

from e2e.sglang.unit.engine import Build, Engine, expected
from e2e.sglang.unit.plans import Chaos
from plait.backends.sglang.settings import Settings
from plait.policy.scheduling.local_scheduler import SCHEDULERS


def workload(engine: Engine, seed: int, *, most: int, arrivals: tuple[int, ...]) -> list[dict[str, int]]:
    """Calls that share prefixes arrive and run at random; the same for every engine. No prompt is longer than `most`.

    So many arrive in a step as one of `arrivals` says.
    """
    dice = random.Random(seed)
    prefixes = [[dice.randrange(1000) for _ in range(dice.randrange(most // 2))] for _ in range(4)]
    steps = []
    for _ in range(60):
        for _ in range(dice.choice(arrivals)):
            own = [dice.randrange(1000) for _ in range(dice.randrange(1, most // 2))]
            engine.add([*dice.choice(prefixes), *own], dice.randrange(1, 30))
        steps.append(engine.step())
    return steps + engine.run()


def aborted(engine: Engine, seed: int) -> None:
    """Many calls, some of which are aborted while they wait, are prefilled or decode."""
    dice = random.Random(seed)
    for number in range(60):
        engine.add([dice.randrange(1000) for _ in range(dice.randrange(1, 400))], dice.randrange(1, 30))
        if dice.random() < 0.4:
            engine.abort(f"call-{dice.randrange(number + 1)}")
        engine.step()
    engine.run()


def outputs(engine: Engine) -> dict[str, list[int]]:
    """What every call would have answered, up to what it did answer."""
    prompts = {name: len(request.origin_input_ids) for name, request in engine.requests.items()}
    return {name: expected(prompts[name], len(tokens)) for name, tokens in engine.tokens.items()}


@pytest.mark.parametrize("seed", range(6))
def test_fcfs_schedules_what_stock_sglang_schedules(build: Build, seed: int) -> None:
    """As long as no prompt has to be cut: our chunks end with a page, and SGLang's need not."""
    stock = build(plait=None)
    steps = workload(stock, seed, most=120, arrivals=(0, 0, 1, 2))
    tokens = stock.tokens
    planned = build(plait=Settings(scheduler="fcfs"))
    assert workload(planned, seed, most=120, arrivals=(0, 0, 1, 2)) == steps
    assert planned.tokens == tokens


@pytest.mark.parametrize("policy", SCHEDULERS)
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_ends_every_call_with_its_output(build: Build, policy: str, seed: int) -> None:
    stock = build(plait=None)
    workload(stock, seed, most=500, arrivals=(0, 0, 1, 2, 5))
    tokens = stock.tokens
    planned = build(plait=Settings(scheduler=policy))
    workload(planned, seed, most=500, arrivals=(0, 0, 1, 2, 5))
    assert planned.tokens == tokens == outputs(planned)


@pytest.mark.parametrize("policy", SCHEDULERS)
@pytest.mark.parametrize("seed", range(2))
def test_aborted_calls_leave_nothing_behind(build: Build, policy: str, seed: int) -> None:
    engine = build(plait=Settings(scheduler=policy))
    aborted(engine, seed)
    assert engine.tokens == outputs(engine)
    queue = engine.driver.report(None, None).queue
    assert (queue.waiting, queue.running) == (0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_breaks_the_engine_or_changes_a_token(build: Build, seed: int) -> None:
    engine, dice = build(Chaos(seed)), random.Random(seed)
    shared = [dice.randrange(1000) for _ in range(250)]
    answers = {}
    for number in range(30):
        own = [dice.randrange(1000) for _ in range(dice.randrange(1, 150))]
        tokens, output_tokens = [*shared[: dice.randrange(250)], *own], dice.randrange(1, 25)
        name = engine.add(tokens, output_tokens, name=f"call-{number:02}-")
        answers[name] = expected(len(tokens), output_tokens)
        engine.step()
    engine.run()
    assert engine.tokens == answers
    assert engine.driver.preemptions
