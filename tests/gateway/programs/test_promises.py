"""What calls are promised when they are ready: what their group shares, and their part of end-to-end times.

Both against what going through all that there is gives: every pair of prompts, every call of the graph.
"""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.calls.guessed_tokens import CHARACTERS_PER_TOKEN
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.promises import promised
from plait.gateway.programs.session import Session
from plait.policy.programs.variable_prefix import NO_OUTLINE, Constant, Outline, Segment
from plait.policy.types import Objective, Slo
from tests.gateway.programs.session_calls import Core, owner
from tests.policy.programs.jct_shares import jct_shares

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


# End-to-end times


def shares_anew(session: Session, now_s: float) -> dict[str, float]:
    """The tightest share of each call, getter by getter, from the whole graph."""

    def left_s(call_id: str) -> float:
        call = session.calls[call_id]
        return max(0.0, call.predicted_s - (0.0 if call.ready_s is None else now_s - call.ready_s))

    tightest: dict[str, float] = {}
    for getter in (getter for waiting in session.getters.values() for getter in waiting):
        if isinstance(getter.mark, Slo) and getter.mark.jct_s is not None:
            elapsed_s = 0.0 if getter.since_s is None else now_s - getter.since_s
            shares = jct_shares(session.graph.view, getter.variable, getter.mark.jct_s - elapsed_s, left_s)
            for call_id, share_s in shares.items():
                tightest[call_id] = min(share_s, tightest.get(call_id, share_s))
    return tightest


def layers(core: Core, random: Random) -> list[HeldCall]:
    """Calls that take some of what the layer before makes; the first layer takes the client's `begin`."""
    calls: list[HeldCall] = []
    before = ["begin"]
    for layer in range(4):
        names = [f"v{layer}.{number}" for number in range(random.randrange(1, 4))]
        for name in names:
            inputs = " ".join(random.sample(before, random.randrange(1, len(before) + 1)))
            calls.append(core.add(f"of_{name}", inputs, [name], prompt_tokens=random.randrange(1000)))
        before = names
    return calls


@given(seed=st.integers(0, 2**32))
def test_at_every_event_a_ready_call_has_the_tightest_of_its_shares(seed: int) -> None:
    core, random, now_s = Core(), Random(seed), 0.0
    calls = layers(core, random)
    gets = [core.get(random.choice(calls).outputs[0].variable, Slo(jct_s=random.uniform(1, 60))) for _ in range(4)]
    core.executor.variables.set_value(core.session(), "begin", "", now_s)
    running: list[HeldCall] = []
    while any(not waiting.told for waiting in gets):
        now_s += random.uniform(0.0, 2.0)
        ready = [call for call in calls if owner(call).ready is not None]
        call = random.choice(ready)
        if call in running:
            core.executor.produce(call, "x" * random.randrange(400), now_s)
            core.executor.finish(call, now_s)
            calls.remove(call)
        else:
            core.executor.start(call, now_s)
            running.append(call)
        session = core.session()
        session.start_clocks()
        anew = shares_anew(session, now_s)
        ready = [call for call in session.calls.values() if owner(call).ready is not None]
        for call, start in promised(session, ready, now_s):
            share_s = anew.get(call.call_id)
            assert (start.slo and start.slo.jct_s if share_s else None) == (share_s or None)
        core.executor.check()
