"""What the router knows of the calls that are asked for, and how it divides the calls of a task group."""

from __future__ import annotations

from collections import Counter

import pytest

from plait.backends.profiles import load_profile
from plait.gateway.fleet.router import Router
from plait.policy.costs.situation import Demand, Situation
from plait.policy.prefix.block_hash import chain
from plait.policy.types import Call, TaskGroup
from tests.invariants import check, check_demand

COSTS = load_profile("a6000-mistral-7b").cost_model()
SHARED_BLOCKS, BLOCK_TOKENS = 94, 64


def prompt(number: int, *, group: TaskGroup | None = None, shared_blocks: int = 0) -> Call:
    """A prompt of 6,200 tokens whose first blocks are those of every other."""
    parts = [block if block < shared_blocks else 1000 * number + block for block in range(96)]
    return Call(f"c{number}", "m", 6200, BLOCK_TOKENS, list(chain(parts, 1, 0)), group=group)


def situation(demand: Demand, call: Call) -> Situation:
    """Of a fleet with one engine."""
    router = Router()
    router.add_engine("a", COSTS)
    return demand.situation(call, [], [router.engines["a"].view], 0.0)


def siblings(demand: Demand, call: Call) -> int:
    return situation(demand, call).siblings


def spread(calls: int, *, grouped: bool) -> list[int]:
    """How many calls with a common prefix go to each of four engines that are busy with other calls, the most first."""
    router = Router()
    for name in "abcd":
        router.add_engine(name, COSTS, kv_tokens=1_000_000)
        router.health.answered(name, {"m": None})
    for number in range(32):
        chat = prompt(100 + number)._replace(prompt_tokens=1000, block_hashes=[])
        booking = router.book(chat, router.select(chat, 0.0), 0.0)
        router.first_token(booking, 1.0)
    group = TaskGroup("g", calls) if grouped else None
    counts: Counter[str] = Counter()
    for number in range(calls):
        call = prompt(number + 1, group=group, shared_blocks=SHARED_BLOCKS)
        placement = router.select(call, 2.0)
        router.book(call, placement, 2.0)
        counts[placement.engine_id] += 1
    check(router)
    return sorted(counts.values(), reverse=True)


def test_a_large_group_is_divided() -> None:
    """As soon as single calls are, whose prefix is used so often by then that copies are made."""
    assert spread(16, grouped=True)[0] <= 8
    assert spread(16, grouped=False)[0] <= 8


def test_a_group_of_few_calls_stays_together() -> None:
    assert spread(2, grouped=True) == [2]


def test_siblings_are_the_calls_of_the_group_that_are_not_placed() -> None:
    demand, group = Demand(60.0, 100.0), TaskGroup("g", 3)
    calls = [prompt(number, group=group) for number in range(3)]
    assert siblings(demand, prompt(9)) == 0
    left = []
    for call in calls:
        left.append(siblings(demand, call))
        demand.placed(call, 0.0)
    assert left == [2, 1, 0]
    check_demand(demand, 3)
    late = prompt(4, group=TaskGroup("g", 1))  # two have ended
    assert siblings(demand, late) == 0
    for call in calls:
        demand.left(call, 1.0)
    check_demand(demand, 0)
    assert siblings(demand, calls[0]) == 2


def test_a_call_on_an_engine_may_change_its_group() -> None:
    demand, group, other = Demand(60.0, 100.0), TaskGroup("g", 3), TaskGroup("h", 2)
    alone, member = prompt(1), prompt(2, group=group)
    for call in (alone, member):
        demand.placed(call, 0.0)
    demand.refined(alone, alone._replace(group=group))
    assert siblings(demand, prompt(3, group=group)) == 0, "both are placed"
    demand.refined(member, member._replace(group=other))
    assert siblings(demand, prompt(3, group=group)) == 1
    for call in (alone._replace(group=group), member._replace(group=other)):
        demand.left(call, 1.0)
    check_demand(demand, 0)


def test_answers_of_task_groups_have_a_length_of_their_own() -> None:
    demand, part, chat = Demand(60.0, 100.0), prompt(1, group=TaskGroup("g", 1)), prompt(2)
    for second in range(100):  # the prior counts as four calls
        for call, output_tokens in ((part, 20), (chat, 400)):
            demand.placed(call, float(second))
            demand.left(call, float(second), output_tokens)
    lengths = [
        situation(demand, call).traffic.expected_output_tokens(None)
        for call in (part, chat, chat._replace(model="other"))
    ]
    assert lengths == [pytest.approx(26, abs=1), pytest.approx(378, abs=3), 100]
