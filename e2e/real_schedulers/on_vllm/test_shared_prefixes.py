"""Calls with a common prefix that wait together: vLLM computes the prefix once, whatever their objectives."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.real_schedulers.on_vllm.fixtures import Build

PREFIX = [(7 + position * 13) % 1000 for position in range(1200)]
CALLS, OWN_TOKENS = 6, 100
BATCH_TOKENS = 500
"""No whole number of blocks, so a call finds less in the cache than the call before it has computed."""


def own(number: int) -> list[int]:
    return [(number * 37 + position * 11) % 1000 for position in range(OWN_TOKENS)]


@pytest.mark.parametrize("objectives", [{}, {"plait_jct_ms": 3000}, {"plait_ttft_ms": 60_000}])
def test_the_prefix_is_computed_once(build: Build, objectives: dict[str, Any]) -> None:
    engine = build(max_batch_tokens=BATCH_TOKENS, blocks=1000)
    for number in range(CALLS):
        engine.add([*PREFIX, *own(number)], output_tokens=1, **objectives)
    computed = sum(sum(step.values()) for step in engine.run())
    assert computed == len(PREFIX) + CALLS * OWN_TOKENS


def test_a_follower_goes_on_if_its_leader_is_aborted(build: Build) -> None:
    engine = build(max_batch_tokens=BATCH_TOKENS, blocks=1000)
    leader = engine.add([*PREFIX, *own(0)], plait_jct_ms=3000)
    follower = engine.add([*PREFIX, *own(1)], plait_jct_ms=3000)
    assert engine.step() == {leader: BATCH_TOKENS}
    engine.abort(leader)
    assert engine.step() == {follower: BATCH_TOKENS}, "it takes what is stored, and computes the rest itself"


def test_calls_of_one_iteration_share_what_it_computes_and_the_plan_knows(build: Build) -> None:
    engine = build(max_batch_tokens=2000, blocks=1000)
    names = [engine.add([*PREFIX, *own(number)], plait_jct_ms=3000) for number in range(CALLS)]
    assert engine.step() == {names[0]: len(PREFIX) + OWN_TOKENS, **dict.fromkeys(names[1:], OWN_TOKENS)}
    assert engine.planner.diverged_picks == 0
