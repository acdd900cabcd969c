"""Native steps: what the client computes between two calls is a part of the graph, and holds nobody for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from plait.backends.errors import ConflictError, PlaitError, ValueTooLargeError
from plait.gateway.guests.programs.core.held_call import HeldCall
from plait.gateway.guests.programs.core.session_errors import FailureCause
from plait.gateway.guests.programs.native_step import DeclaredStep, NativeSteps
from plait.policy.types import Objective, Slo
from tests.gateway.guests.programs.chained_gateway import Exchange, Served, served_calls, settle
from tests.gateway.guests.programs.core.session_calls import Core, owner
from tests.invariants import check

LATENCY = Objective.LATENCY


class Steps(Core):
    """An executor whose clients compute variables themselves."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.natives = NativeSteps(self.executor)

    def declare(self, output: str, inputs: str, now_s: float = 0.0, *, seconds: float = 0.0) -> None:
        step = DeclaredStep(output, inputs.split(), seconds)
        self.natives.declare(self.session(now_s=now_s), step, f"step-{output}", now_s)
        check(self.executor)

    def compute(self, output: str, value: str = "1", now_s: float = 0.0) -> None:
        self.natives.set_value(self.session(now_s=now_s), output, value, now_s)
        check(self.executor)

    def refusal(self, output: str, value: str = "1") -> str | None:
        with pytest.raises(PlaitError) as caught:
            self.compute(output, value)
        return caught.value.code


def ended(*calls: HeldCall) -> list[tuple[int, str | None]]:
    found = []
    for call in calls:
        error = owner(call).error
        assert error is not None
        found.append((error.status, error.code))
    return found


def test_calls_wait_for_what_the_client_computes() -> None:
    core = Steps(gather_ms=10)
    first = core.add("A", outputs=["code"])
    core.declare("parsed", "code")
    after = core.add("B", "parsed code", ["end"])
    got, inputs = core.get("end", LATENCY), core.get("code")
    assert core.refusal("parsed") == "inputs_missing"
    core.run(first, "x = 1")
    assert (inputs.told, owner(after).ready) == (["x = 1"], None)
    core.compute("parsed", "{x: 1}")
    ready = owner(after).ready
    assert ready is not None
    assert dict(ready.values) == {"code": "x = 1", "parsed": "{x: 1}"}
    core.run(after, "fine")
    assert got.told == ["fine"]
    assert core.refusal("parsed") == "double_producer"


def test_calls_before_it_run_as_one_group_with_the_objective_of_what_comes_after_it() -> None:
    core = Steps(gather_ms=10)
    maps = [core.add(f"M{number}", outputs=[f"m{number}"]) for number in range(3)]
    core.declare("joined", "m0 m1 m2")
    core.add("R", "joined", ["end"])
    core.get("end", LATENCY)
    started = [owner(call).ready for call in maps]
    assert [ready.group.calls for ready in started if ready is not None and ready.group is not None] == [3, 3, 3]
    assert {ready.objective for ready in started if ready is not None} == {LATENCY}


def test_its_declared_time_is_left_out_of_the_shares_of_calls() -> None:
    shares = []
    for seconds in (0.0, 2.0):
        core = Steps()
        core.declare("b", "a", seconds=seconds)
        core.add("B", "b", ["c"], prompt_tokens=100)
        core.get("c", Slo(jct_s=8.0))
        ready = owner(core.add("A", outputs=["a"], prompt_tokens=100)).ready
        assert ready is not None
        assert ready.slo is not None
        shares.append(ready.slo.jct_s)
    assert shares == [pytest.approx(4.0), pytest.approx(2.0)]


def test_a_step_without_a_call_before_it_begins_the_job() -> None:
    core = Steps(gather_ms=10)
    core.compute("task", "it")
    core.declare("b", "task")
    core.get("c", Slo(jct_s=8.0))
    after = core.add("B", "b", ["c"])
    core.compute("b", now_s=2.0)
    core.run(after, "x", now_s=3.0)
    assert core.session().made["c"].begun_s == 0.0


def test_a_failed_input_fails_it_and_what_comes_after_it() -> None:
    core = Steps()
    first = core.add("A", outputs=["code"])
    core.declare("parsed", "code task")
    held, got = core.add("B", "parsed"), core.get("parsed")
    core.executor.fail(first, "no engine", 0.0)
    (error,) = got.told
    assert [(cause.call, cause.variable) for cause in error.causes] == [("step-parsed", "parsed"), ("A", "code")]
    assert ended(held) == [(424, "input_failed")]
    core.declare("late", "code")
    (error,) = core.get("late").told
    assert error.code == "variable_failed"


def test_the_client_fails_it() -> None:
    core = Steps()
    core.declare("parsed", "code")
    held = core.add("B", "parsed")
    core.natives.set_failed(core.session(), "parsed", FailureCause(message="ValueError: no code"), 1.0)
    assert ended(held) == [(424, "input_failed")]
    assert "step-parsed: ValueError: no code" in str(owner(held).error)
    core.declare("parsed", "code", 2.0)
    core.compute("code")
    core.compute("parsed")
    with pytest.raises(ConflictError):
        core.natives.set_failed(core.session(), "parsed", FailureCause(message="late"), 3.0)


def test_a_value_that_is_too_large_leaves_it_as_it_was() -> None:
    core = Steps(max_value_bytes=10)
    core.compute("code")
    core.declare("parsed", "code")
    with pytest.raises(ValueTooLargeError):
        core.compute("parsed", "x" * 11)
    core.compute("parsed", "short")
    assert core.get("parsed").told == ["short"]


def test_a_second_producer_and_a_cycle_are_refused() -> None:
    core = Steps()
    core.add("A", "b", ["a"])
    for output, inputs, code in (("a", "x", "double_producer"), ("b", "a", "cycle"), ("c", "c", "cycle")):
        with pytest.raises(ConflictError) as caught:
            core.declare(output, inputs)
        assert caught.value.code == code
    core.declare("c", "a")
    core.declare("c", "a")
    with pytest.raises(ConflictError):
        core.declare("c", "a x")
    with pytest.raises(ConflictError):
        core.add("C", outputs=["c"])


# A client that does not compute it.


def test_it_waits_for_its_client_from_when_its_inputs_have_values() -> None:
    core = Steps(hold_timeout_s=300)
    core.declare("b", "a")
    first = core.add("A", outputs=["a"], now_s=1.0)
    held, other = core.add("B", "b", now_s=1.0), core.add("C", "unknown", now_s=150.0)
    core.executor.endings.expire(302.0)
    core.run(first, "x", now_s=400.0)
    core.executor.endings.expire(451.0)
    assert ended(other) == [(424, "nobody_produces")], "it is due before the step, which was there first"
    core.executor.endings.expire(699.0)
    assert owner(held).error is None
    core.executor.endings.expire(700.0)
    (error,) = core.get("b").told
    assert (error.status, error.code, error.causes[-1].code) == (424, "not_computed", "not_computed")
    assert "the client has not computed 'b' in time" in error.message
    assert ended(held) == [(424, "not_computed")]
    check(core.executor)


def test_a_step_that_was_computed_in_time_is_not_looked_at_again() -> None:
    core = Steps(hold_timeout_s=300)
    core.compute("a")
    core.declare("b", "a")
    core.compute("b")
    core.executor.endings.expire(301.0)
    assert core.get("b").told == ["1"]


def test_an_input_that_nobody_produces_fails_it() -> None:
    core = Steps(hold_timeout_s=300)
    core.declare("b", "a")
    got = core.get("b")
    core.executor.endings.expire(301.0)
    (error,) = got.told
    assert "nobody produces 'a'" in error.message


def test_a_closed_session_ends_steps_whose_inputs_have_come_or_cannot_come() -> None:
    core = Steps()
    first = core.add("A", outputs=["a"])
    core.compute("x")
    for output, inputs in (("now", "x"), ("never", "unknown"), ("later", "a")):
        core.declare(output, inputs)
    now, never, later = core.get("now"), core.get("never"), core.get("later")
    core.executor.endings.close(core.session(), 1.0)
    assert [got.told[0].code for got in (now, never)] == ["not_computed", "variable_failed"]
    assert later.told == []
    assert core.refusal("later") == "session_closed"
    core.run(first, "y", now_s=2.0)
    assert later.told[0].code == "not_computed"
    assert "before the session was closed" in later.told[0].message
    check(core.executor)


# Over HTTP.


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls() as served:
        yield served


async def declare(served: Served, output: str, *inputs: str, **more: Any) -> Exchange:
    body = {"session_id": "s", "semantic_var_id": output, "inputs": inputs, **more}
    return await served.send("/v1/variables", body)


async def test_a_step_is_declared_and_computed_over_http(served: Served) -> None:
    held = await served.chat("Test {{parsed}}", inputs="parsed")
    assert (await declare(served, "parsed", "code", seconds=0.5)).json["state"] == "pending"
    assert (await declare(served, "parsed", "code", seconds=0.5)).status == 200
    code = await served.get("code")
    await served.chat("Write", output="code")
    await served.engine.answer("Write", "x")
    assert code.json["value"] == "x"
    assert (await served.value("parsed", "{x}")).json["state"] == "set"
    await served.engine.answer("Test {x}", "fine")
    assert held.text == "fine"


async def test_a_step_is_failed_over_http(served: Served) -> None:
    await declare(served, "parsed", "code")
    held = await served.chat("Test {{parsed}}", inputs="parsed")
    body = {"session_id": "s", "semantic_var_id": "parsed", "error": "ValueError: no code"}
    assert (await served.send("/v1/variables", body)).json["state"] == "failed"
    assert held.refusal == (424, "input_failed")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a b"]}, "inputs"),
        ({"inputs": ["a"], "value": "1"}, "inputs"),
        ({"inputs": ["a"], "error": "no"}, "inputs"),
        ({"inputs": ["a"], "seconds": -1}, "seconds"),
        ({"seconds": 1}, "seconds"),
    ],
)
async def test_a_wrong_declaration_names_its_field(served: Served, more: dict[str, Any], param: str) -> None:
    got = await served.send("/v1/variables", {"session_id": "s", "semantic_var_id": "b", **more})
    assert (got.status, got.json["error"]["param"], len(served.executor.sessions)) == (400, param, 0)


async def test_when_the_gateway_stops_no_value_comes_any_more(served: Served) -> None:
    await served.value("code", "x")
    await declare(served, "parsed", "code")
    held = await served.chat("Test {{parsed}}", inputs="parsed")
    served.gateway.on_closed()
    await settle()
    assert held.refusal == (503, "gateway_stopping")


async def test_a_step_is_cancelled_by_the_id_of_its_request(served: Served) -> None:
    await declare(served, "parsed", "code")
    held = await served.chat("Test {{parsed}}", inputs="parsed")
    shown = (await served.send("/v1/sessions/s", method="GET")).json
    (producer,) = (one["producer"] for one in shown["variables"] if one["semantic_var_id"] == "parsed")
    assert (await served.send(f"/v1/sessions/s/calls/{producer}", method="DELETE")).status == 200
    assert held.refusal == (424, "input_failed")


# In a program.


def program_of(**more: Any) -> dict[str, Any]:
    def call(prompt: str, taken: str, made: str) -> dict[str, Any]:
        return {"model": "m", "prompt": prompt, "placeholders": [{"name": taken}, {"name": made, "in_out": True}]}

    calls = [call("Do {{task}} {{code}}", "task", "code"), call("Test {{parsed}} {{test}}", "parsed", "test")]
    natives = [{"output": "parsed", "inputs": ["code", "task"]}]
    return {"session": "s", "values": {"task": "it"}, "calls": calls, "natives": natives, **more}


async def test_a_program_has_a_native_step_between_two_calls(served: Served) -> None:
    got = await served.send("/v1/programs", program_of(gets={"test": "latency", "parsed": None}))
    asked, _, _ = served.engine.running["Do it "]
    assert asked.call.objective is LATENCY
    await served.engine.answer("Do it ", "x")
    again = await served.send("/v1/programs", program_of(gets={"parsed": None}))
    await served.value("parsed", "{x}")
    await served.engine.answer("Test {x} ", "fine")
    assert got.json["values"] == {"test": "fine", "parsed": "{x}"}
    assert again.json["values"] == {"parsed": "{x}"}


async def test_a_program_whose_client_has_gone_leaves_no_step_behind() -> None:
    async with served_calls(gone_grace_s=0.0) as served:
        got = await served.send("/v1/programs", program_of(gets={"test": None}))
        await got.leave()
        assert (served.engine.running, [session.calls for session in served.executor.sessions]) == ({}, [{}])


@pytest.mark.parametrize(
    ("natives", "refusal", "param"),
    [
        ([{"output": "parsed"}], (400, None), "natives"),
        ([{"output": "parsed", "inputs": []}], (400, None), "natives"),
        ([{"output": "parsed", "inputs": ["code"], "function": "f"}], (400, None), "natives"),
        ([{"output": "parsed", "inputs": ["none"]}], (400, "unknown_variable"), "natives[0]"),
        ([{"output": "code", "inputs": ["task"]}], (409, "double_producer"), "natives[0]"),
        ([{"output": "task", "inputs": ["code"]}], (409, "double_producer"), "natives[0]"),
        ([{"output": "parsed", "inputs": ["test"]}], (409, "cycle"), "natives[0]"),
        ([{"output": "parsed", "inputs": ["code"]}] * 2, (409, "double_producer"), "natives[1]"),
    ],
)
async def test_a_refused_step_refuses_its_program(
    served: Served, natives: list[Any], refusal: tuple[int, str | None], param: str
) -> None:
    got = await served.send("/v1/programs", program_of(natives=natives))
    assert (got.refusal, got.json["error"]["param"]) == (refusal, param)
    assert (served.engine.delivered, len(served.executor.sessions)) == ([], 0)


async def test_a_program_sets_what_was_declared_before_it(served: Served) -> None:
    got = await served.send("/v1/programs", program_of(gets={"test": None}))
    await served.engine.answer("Do it ", "x")
    late = {"session": "s", "values": {"parsed": "{x}"}, "gets": {"parsed": None}}
    assert (await served.send("/v1/programs", late)).json["values"] == {"parsed": "{x}"}
    await served.engine.answer("Test {x} ", "fine")
    assert got.json["values"] == {"test": "fine"}
    assert (await served.send("/v1/programs", late)).json["values"] == {"parsed": "{x}"}
    late["values"] = {"parsed": "{y}"}
    assert (await served.send("/v1/programs", late)).refusal == (409, "double_producer")
    check(served.executor)


async def test_a_program_sets_inputs_and_what_follows_from_them_whatever_their_order(served: Served) -> None:
    await declare(served, "c", "b")
    await declare(served, "b", "a")
    held = await served.chat("Test {{c}}", inputs="c")
    got = await served.send("/v1/programs", {"session": "s", "values": {"c": "3", "b": "2", "a": "1"}})
    await served.engine.answer("Test 3", "fine")
    assert (got.status, held.text) == (202, "fine")
    check(served.executor)


@pytest.mark.parametrize(
    ("values", "refusal", "message"),
    [
        ({"parsed": "{x}"}, (409, "inputs_missing"), "values.parsed: The inputs of 'parsed' have no values yet: code."),
        ({"parsed": "x" * 11}, (409, "inputs_missing"), "values.parsed: "),
        ({"code": "x", "parsed": "x" * 11}, (413, "value_too_large"), "values.parsed: "),
    ],
)
async def test_a_program_cannot_set_what_its_client_cannot_have_computed(
    values: dict[str, str], refusal: tuple[int, str], message: str
) -> None:
    async with served_calls(max_value_bytes=10) as served:
        await declare(served, "parsed", "code")
        got = await served.send("/v1/programs", {"session": "s", "values": {"task": "it", **values}})
        assert (got.refusal, got.json["error"]["param"]) == (refusal, "values.parsed")
        assert got.json["error"]["message"].startswith(message)
        (session,) = served.executor.sessions
        assert (session.values, session.state_of("parsed")) == ({}, "pending")
