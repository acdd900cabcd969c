"""Calls with a condition: the side that is not taken is skipped at once, with all that needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import FailedDependencyError
from plait.gateway.calls.condition import Condition, read_condition
from plait.gateway.guests.programs.core.held_call import HeldCall
from plait.policy.types import Objective
from tests.gateway.guests.programs.chained_gateway import CHAT, Exchange, Served, served_calls
from tests.gateway.guests.programs.core.session_calls import Core, owner
from tests.invariants import check

SKIPPED = (424, "skipped")


def add(core: Core, name: str, inputs: str, output: str, when: str | None = None, **more: Any) -> HeldCall:
    """A call with a condition, as the readers of requests make it."""
    condition = None if when is None else read_condition(when)
    taken = inputs.split() + ([] if condition is None else [condition.variable])
    return core.add(name, " ".join(dict.fromkeys(taken)), [output] if output else [], when=condition, **more)


def ends(*calls: HeldCall) -> list[Any]:
    """How each call stands: an error's status and code, or whether it is ready."""
    errors = [(call, owner(call).error) for call in calls]
    return [owner(call).ready is not None if error is None else (error.status, error.code) for call, error in errors]


def sides(core: Core, **more: Any) -> tuple[HeldCall, HeldCall]:
    yes = add(core, "Y", "text", "long", 'verdict == "yes"', **more)
    return yes, add(core, "N", "text", "short", 'verdict != "yes"', **more)


def test_the_side_that_is_not_taken_is_skipped_with_what_needs_it() -> None:
    core = Core()
    judge = core.add("J", outputs=["verdict"])
    core.executor.variables.set_value(core.session(), "text", "t", 0.0)
    yes, no = sides(core)
    after, both, got = add(core, "A", "short", "end"), add(core, "B", "long short", ""), core.get("end")
    core.run(judge, " yes\n")
    check(core.executor)
    assert ends(yes, no, after, both) == [True, SKIPPED, SKIPPED, SKIPPED]
    (error,) = got.told
    assert error.message.startswith("The variable 'end' was skipped: A: its input short failed, because N: it was")
    assert 'its condition verdict != "yes" does not hold' in error.message
    assert (error.code, error.transient, error.causes[-1].code) == ("skipped", False, "skipped")
    assert str(owner(no).error).startswith("This call does not run: N: it was skipped")
    variables = core.executor.variables
    assert (variables.counts["set"], variables.counts["failed"], variables.counts["skipped"]) == (2, 0, 2)


def test_a_side_is_skipped_before_its_other_inputs_have_come() -> None:
    core = Core()
    core.add("T", outputs=["text"])
    yes, no = sides(core)
    core.executor.variables.set_value(core.session(), "verdict", "no", 0.0)
    assert ends(yes, no) == [SKIPPED, False]


def test_a_call_that_comes_when_its_condition_is_decided_already() -> None:
    core = Core(gather_ms=10)
    for name in ("verdict", "text"):
        core.executor.variables.set_value(core.session(), name, "no", 0.0)
    yes, no = sides(core, objective=Objective.LATENCY)
    assert ends(yes, no) == [SKIPPED, True]
    check(core.executor)


def test_what_only_the_untaken_side_needed_is_cancelled_unless_a_client_waits() -> None:
    core = Core()
    unwanted, wanted = core.add("U", outputs=["u"], clients=0), core.add("W", outputs=["w"])
    shared = core.add("S", outputs=["s"], clients=0)
    add(core, "Y", "u w s", "y", 'verdict == "yes"', clients=0)
    no = add(core, "N", "s", "n", 'verdict == "no"')
    core.executor.start(unwanted, 0.0)
    core.executor.variables.set_value(core.session(), "verdict", "no", 0.0)
    assert ends(unwanted, wanted, shared, no) == [(424, "cancelled"), True, True, False]
    check(core.executor)


def test_a_variable_that_fails_fails_the_calls_that_it_decides() -> None:
    core = Core()
    judge = core.add("J", outputs=["verdict"])
    yes, no = sides(core)
    core.executor.fail(judge, "no engine", 0.0)
    assert ends(yes, no) == [(424, "input_failed")] * 2


def test_the_sides_are_one_group_until_one_is_skipped() -> None:
    core = Core()
    maps = [add(core, f"M{number}", "", f"m{number}", f'v{number} == "yes"') for number in range(3)]
    add(core, "R", "m0 m1", "r")
    core.get("r", Objective.LATENCY)
    core.get("m2", Objective.LATENCY)
    core.executor.variables.set_value(core.session(), "v0", "yes", 0.0)
    ready = owner(maps[0]).ready
    assert ready is not None
    assert ready.group is not None
    assert ready.group.calls == 2
    core.executor.variables.set_value(core.session(), "v1", "no", 0.0)
    assert ends(*maps) == [True, SKIPPED, False]
    check(core.executor)


def test_a_skipped_variable_may_be_produced_again() -> None:
    core = Core()
    core.executor.variables.set_value(core.session(), "verdict", "no", 0.0)
    add(core, "Y", "", "answer", 'verdict == "yes"')
    again = add(core, "N", "", "answer", 'verdict == "no"')
    core.run(again, "short")
    assert core.get("answer").told == ["short"]


# Against the definition.


@given(seed=st.integers(0, 2**32))
def test_a_call_runs_if_its_condition_holds_and_its_inputs_come(seed: int) -> None:
    random, core = Random(seed), Core()
    size = random.randrange(2, 9)
    texts = [random.choice(["yes", "no"]) for _ in range(size)]
    inputs = [random.sample(range(number), min(number, random.randrange(3))) for number in range(size)]
    whens = [
        Condition(f"v{random.randrange(number)}", random.choice(["==", "!=", "contains"]), random.choice(["yes", "no"]))
        if number and random.random() < 0.6
        else None
        for number in range(size)
    ]

    @cache
    def runs(number: int) -> bool:
        when = whens[number]
        decided = when is None or (runs(int(when.variable[1:])) and when.holds(texts[int(when.variable[1:])]))
        return decided and all(runs(taken) for taken in inputs[number])

    to_come, calls, run = random.sample(range(size), size), dict[int, HeldCall](), set[int]()
    while to_come or any(owner(call).ready for number, call in calls.items() if number not in run):
        ready = [number for number, call in calls.items() if owner(call).ready and number not in run]
        if to_come and (not ready or random.random() < 0.5):
            number = to_come.pop()
            when, names = whens[number], [f"v{taken}" for taken in inputs[number]]
            with suppress(FailedDependencyError):  # an input was skipped before
                calls[number] = add(core, f"C{number}", " ".join(names), f"v{number}", str(when) if when else None)
        else:
            number = random.choice(ready)
            run.add(number)
            core.run(calls[number], texts[number])
        check(core.executor)
        for call in core.session().calls.values():
            value = None if call.when is None else core.session().values.get(call.when.variable)
            assert value is None or (call.when is not None and call.when.holds(value)), "it is skipped at once"
    assert run == {number for number in range(size) if runs(number)}
    assert {end for number, call in calls.items() if number not in run for end in ends(call)} <= {SKIPPED}


# Over HTTP.


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls() as served:
        yield served


async def chat(served: Served, text: str, when: str, **headers: str) -> Exchange:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return await served.send(CHAT, body, plait_session="s", plait_when=when, **headers)


async def test_calls_by_headers_take_one_side(served: Served) -> None:
    yes = await chat(served, "Praise {{verdict}}", 'verdict contains "yes"', plait_output="long")
    no = await chat(served, "Mend {{verdict}}", 'verdict == "no"', plait_inputs="verdict")
    got = await served.get("long")
    await served.value("verdict", "no ")
    assert (yes.refusal, got.refusal) == (SKIPPED, SKIPPED)
    assert list(served.engine.running) == ["Mend no "]
    await served.engine.answer("Mend no ", "done")
    assert no.text == "done"
    again = await chat(served, "Praise {{verdict}}", 'verdict contains "yes"', plait_output="long")
    assert again.refusal == SKIPPED
    read = (await served.send("/v1/variables/s/long", method="GET")).json
    assert (read["state"], read["error"]["code"]) == ("failed", "skipped")


async def test_only_declared_inputs_are_replaced(served: Served) -> None:
    await served.value("verdict", "yes")
    await chat(served, "Keep {{verdict}}", 'verdict == "yes"')
    assert list(served.engine.running) == ["Keep {{verdict}}"]
    await served.engine.answer("Keep {{verdict}}", "done")


async def test_submitted_calls_take_one_side(served: Served) -> None:
    await served.submit("Praise {{long}}", "long", when='verdict == "yes"')
    await served.submit("Mend {{short}}", "short", when='verdict == "no"')
    await served.value("verdict", "yes")
    assert (await served.get("short")).refusal == SKIPPED
    assert list(served.engine.running) == ["Praise "]
    await served.engine.answer("Praise ", "x")


@pytest.mark.parametrize("when", ["verdict", 'verdict = "yes"', 'verdict contains ""'])
async def test_a_wrong_condition_is_refused_by_its_field(served: Served, when: str) -> None:
    by_header = await chat(served, "x", when)
    submitted = await served.submit("Praise {{long}}", "long", when=when)
    assert [(got.status, got.json["error"]["param"]) for got in (by_header, submitted)] == [
        (400, "plait-when"),
        (400, "when"),
    ]
    in_plait = await served.submit("Praise {{long}}", "long", plait={"when": 'v == "x"'})
    assert (in_plait.status, in_plait.json["error"]["param"]) == (400, "plait.when")
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    without_session = await served.send(CHAT, body, plait_when='v == "x"')
    assert (without_session.status, without_session.json["error"]["param"]) == (400, "plait-session")


def program_of(when: str = 'verdict == "yes"', **more: Any) -> dict[str, Any]:
    def call(prompt: str, made: str, **fields: Any) -> dict[str, Any]:
        return {"model": "m", "prompt": prompt, "placeholders": [{"name": made, "in_out": True}], **fields}

    calls = [
        call("Judge {{verdict}}", "verdict"),
        call("Praise {{long}}", "long", when=when),
        call("Mend {{short}}", "short", when='verdict != "yes"'),
    ]
    return {"session": "s", "calls": calls, "gets": {"long": "latency", "short": "latency"}, **more}


async def test_a_program_takes_one_side(served: Served) -> None:
    got = await served.send("/v1/programs", program_of())
    asked, _, _ = served.engine.running["Judge "]
    assert asked.call.objective is Objective.LATENCY, "deduced through the conditions"
    await served.engine.answer("Judge ", "yes")
    assert list(served.engine.running) == ["Praise "]
    await served.engine.answer("Praise ", "fine")
    assert (got.status, got.json["values"]) == (200, {"long": "fine"})
    assert {name: error["code"] for name, error in got.json["errors"].items()} == {"short": "skipped"}


@pytest.mark.parametrize(
    ("when", "refusal", "param"),
    [
        ("verdict", (400, None), "calls[1].when"),
        ('none == "x"', (400, "unknown_variable"), "calls[1].when"),
        ('long == "x"', (409, "cycle"), "calls[1].placeholders"),
    ],
)
async def test_a_program_with_a_wrong_condition_is_refused(
    served: Served, when: str, refusal: tuple[int, str | None], param: str
) -> None:
    got = await served.send("/v1/programs", program_of(when))
    assert (got.refusal, got.json["error"]["param"]) == (refusal, param)
    assert (served.engine.delivered, len(served.executor.sessions)) == ([], 0)
