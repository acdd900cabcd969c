"""The calls in the reports are those that the engine has, whatever happened to them."""

from __future__ import annotations

import random

import pytest

from e2e.real_schedulers.built_engine import Build
from e2e.real_schedulers.following import Follower
from e2e.real_schedulers.plans import Chaos
from e2e.real_schedulers.workloads import prompt
from plait.backends.protocol.cache_state import OutstandingCall
from plait.policy.prefix.block_hash import chain, root_hash

TREE_BLOCK_TOKENS = 64


@pytest.mark.parametrize("chaos", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_reports_have_the_calls_of_the_engine_through_any_workload(build: Build, seed: int, chaos: bool) -> None:
    """Some are aborted while they wait, some while they are prefilled or decode; chaos preempts some."""
    engine, dice = build(Chaos(seed) if chaos else None), random.Random(seed)
    everyone, one, two = Follower(engine), Follower(engine, "one"), Follower(engine, "two")
    names: list[str] = []
    for _ in range(100):
        for _ in range(dice.choice((0, 0, 1, 2))):
            tokens, gateway = prompt(dice.randrange(1, 500), len(names)), dice.choice(("one", "two"))
            names.append(engine.add(tokens, dice.randrange(1, 40), plait_gateway=gateway))
        if names and dice.random() < 0.2:
            engine.abort(dice.choice(names))
        engine.step()
        queue = everyone.follow().queue
        assert len(everyone.calls) == queue.waiting + queue.running, "each has a gateway"
        if dice.random() < 0.5:
            one.follow()
            two.follow()
            assert one.calls.keys() | two.calls.keys() == everyone.calls.keys()
            assert all(call.gateway == "two" for call in one.calls.values())
            computed = {number for number, call in everyone.calls.items() if call.is_computed}
            assert {number for of in (one, two) for number, call in of.calls.items() if call.is_computed} == computed
    engine.run()
    for follower in (everyone, one, two):
        follower.follow()
        assert not follower.calls


def test_a_call_is_reported_with_what_it_has_to_compute(build: Build) -> None:
    engine = build()
    follower = Follower(engine, "one")
    tokens = prompt(200, 1)
    engine.add(tokens, 1)
    engine.run()
    follower.follow()
    assert not follower.calls, "no gateway has sent it"
    name = engine.add([*tokens, *prompt(2 * engine.batch_tokens, 2)], 9, plait_gateway="two", plait_ttft_ms=9000)
    engine.step()
    state = follower.follow()
    assert state.calls is not None
    (call,) = state.calls
    length = 200 + 2 * engine.batch_tokens
    hashes = list(chain([*tokens, *prompt(2 * engine.batch_tokens, 2)], TREE_BLOCK_TOKENS, root_hash("tiny")))
    stored = sum(block in follower.known for block in hashes)
    assert stored >= 3
    assert call == OutstandingCall(1, "two", length, length - 64 * stored, True, False, hashes)
    while not engine.tokens[name]:
        engine.step()
    follower.follow()
    assert follower.calls == {1: OutstandingCall(1, "two", length, 0, True, True, [])}
