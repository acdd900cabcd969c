"""What a task group's calls are known to share when one of them is ready, against comparing all of them by pairs."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.calls.guessed_tokens import CHARACTERS_PER_TOKEN
from plait.gateway.programs.held_call import HeldCall
from plait.policy.programs.variable_prefix import NO_OUTLINE, Constant, Outline, Segment
from plait.policy.types import Objective
from tests.gateway.programs.session_calls import Core, owner

RULES, CODE, TEST = Constant(b"Keep to the rules.", 50), Constant(b"Write code.", 10), Constant(b"Write a test.", 20)
VALUES = {"design": "d" * 400, "style": "s" * 40, "task": ""}


def add(core: Core, call_id: str, *segments: Segment, **more: Any) -> HeldCall:
    inputs = " ".join(dict.fromkeys(part for part in segments if isinstance(part, str)))
    return core.add(call_id, inputs, [f"of_{call_id}"], outline=Outline.of(segments, 0), **more)


def reduce(core: Core, *calls: str) -> HeldCall:
    """Makes the calls a task group."""
    return core.add("R", " ".join(f"of_{call}" for call in calls), ["result"], objective=Objective.LATENCY)


def shared_tokens(call: HeldCall) -> int:
    ready = owner(call).ready
    assert ready is not None
    assert ready.group is not None
    return ready.group.shared_tokens


def test_a_group_knows_what_its_calls_share_before_they_have_values() -> None:
    core = Core()
    reduce(core, "A", "B")
    first = add(core, "A", RULES, "design", CODE)
    waits = add(core, "B", RULES, "design", "style", TEST)
    core.executor.variables.set_value(core.session(), "design", VALUES["design"], 1.0)
    assert shared_tokens(first) == 50 + 400 // CHARACTERS_PER_TOKEN
    assert owner(waits).ready is None


def test_a_call_that_has_ended_keeps_nothing_and_limits_nobody() -> None:
    core = Core()
    reduce(core, "A", "B", "C")
    other = add(core, "A", TEST)
    calls = [add(core, call, RULES, "design", CODE) for call in "BC"]
    core.run(other, "text")
    assert other.outline == NO_OUTLINE
    core.executor.variables.set_value(core.session(), "design", "", 1.0)
    assert [shared_tokens(call) for call in calls] == [60, 60]
    core.executor.fail(calls[0], "no", 2.0)
    assert (calls[0].outline, calls[1].outline != NO_OUTLINE) == (NO_OUTLINE, True)


def test_calls_of_which_nothing_is_known_share_nothing() -> None:
    core = Core()
    reduce(core, "A", "B")
    calls = [add(core, "A", "task", CODE), core.add("B", "task", ["of_B"])]
    core.executor.variables.set_value(core.session(), "task", "", 1.0)
    assert [shared_tokens(call) for call in calls] == [0, 0]


PROMPTS = st.lists(
    st.lists(st.sampled_from([RULES, CODE, "design", "style", "task"]), max_size=4), min_size=2, max_size=5
)


@given(prompts=PROMPTS, order=st.permutations(sorted(VALUES)))
def test_whatever_becomes_ready_when_every_pair_shares_what_its_group_does(
    prompts: list[list[Segment]], order: list[str]
) -> None:
    core = Core()
    reduce(core, *map(str, range(len(prompts))))
    calls = [add(core, str(number), "begin", *prompt) for number, prompt in enumerate(prompts)]
    for name in order:
        core.executor.variables.set_value(core.session(), name, VALUES[name], 1.0)
    core.executor.variables.set_value(core.session(), "begin", "", 2.0)
    expected = min(common_tokens(first, second) for first, second in combinations(prompts, 2))
    assert {shared_tokens(call) for call in calls} == {expected}


def common_tokens(first: list[Segment], second: list[Segment]) -> int:
    tokens = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        tokens += len(VALUES[one]) // CHARACTERS_PER_TOKEN if isinstance(one, str) else one.tokens
    return tokens
