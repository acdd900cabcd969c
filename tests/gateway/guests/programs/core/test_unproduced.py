"""Nobody waits for ever: neither for a refused producer, nor for a name that nobody produces, nor for a gone client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plait.backends.errors import ConflictError, FailedDependencyError
from tests.gateway.guests.programs.chained_gateway import Served, served_calls, settle
from tests.gateway.guests.programs.core.session_calls import Core, owner
from tests.invariants import check

LATER_S = 301.0


def errors_of(*waiting: Any) -> list[tuple[int, str | None]]:
    errors: list[Any] = [one.told[0] if hasattr(one, "told") else owner(one).error for one in waiting]
    return [(error.status, error.code) for error in errors]


# A producer that is refused.


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ({"model": "unknown"}, "code"),
        ({"max_tokens": -1}, "code"),
        ({"messages": "none"}, "code"),
        ({}, "code; transform=unknown"),
        ({"n": 2}, "code"),
        ({"plait": {"priority": "high"}}, "code"),
    ],
    ids=["model", "field", "type", "transform", "choices", "annotation"],
)
async def test_what_waits_for_a_refused_producer_fails_at_once(body: dict[str, Any], output: str) -> None:
    async with served_calls() as served:
        held = await served.chat("Use {{code}}", inputs="code", output="test")
        got = await served.get("test")
        refused = await served.chat("Write", output=output, **body)
        assert refused.status in {400, 404}
        assert (held.refusal, got.refusal) == ((424, "input_failed"), (424, "variable_failed"))
        assert "it was refused" in held.json["error"]["message"]
        again = await served.chat("Write", output="code")
        second = await served.chat("Use {{code}}", inputs="code")
        await served.engine.answer("Write", "x")
        await served.engine.answer("Use x", "fine")
        assert (again.text, second.text) == ("x", "fine")


async def test_a_refused_second_producer_changes_nothing() -> None:
    async with served_calls() as served:
        held = await served.chat("Use {{code}}", inputs="code")
        await served.chat("Write", output="code")
        assert (await served.chat("Write", output="code", model="unknown")).status == 404
        await served.engine.answer("Write", "x")
        await served.engine.answer("Use x", "fine")
        assert held.text == "fine"


async def test_annotations_in_the_body_name_the_output_too() -> None:
    async with served_calls() as served:
        held = await served.chat("Use {{code}}", inputs="code")
        body = {"model": "unknown", "messages": [], "plait": {"session": "s", "output": "code"}}
        await served.send("/v1/chat/completions", body)
        assert held.refusal == (424, "input_failed")


async def test_what_comes_after_a_refused_producer_fails_too() -> None:
    async with served_calls() as served:
        await served.chat("Write", output="code", model="unknown")
        assert (await served.chat("Use {{code}}", inputs="code")).refusal == (424, "input_failed")


# A name that nobody produces.


def test_a_call_waits_for_a_name_that_nobody_produces_for_a_time() -> None:
    core = Core(hold_timeout_s=300)
    core.add("A", outputs=["code"])
    held, behind = core.add("B", "coda", ["test"]), core.add("C", "test")
    got, fine = core.get("tast"), core.get("test")
    core.executor.endings.expire(299.0)
    assert (owner(held).error, got.told) == (None, [])
    core.executor.endings.expire(LATER_S)
    assert errors_of(held, behind, got, fine) == [
        (424, "nobody_produces"),
        (424, "input_failed"),
        (424, "nobody_produces"),
        (424, "variable_failed"),
    ]
    error = owner(held).error
    assert isinstance(error, FailedDependencyError)
    assert "nearest names are 'code'" in error.message
    check(core.executor)


def test_a_call_waits_as_long_as_it_takes_for_what_will_be_produced() -> None:
    core = Core(hold_timeout_s=300)
    held = core.add("B", "code")
    first = core.add("A", outputs=["code"], now_s=299.0)
    core.executor.endings.expire(LATER_S)
    assert owner(held).error is None
    core.run(first, "x", now_s=1_000.0)
    assert owner(held).ready is not None


def test_closing_a_session_ends_what_waits_for_nobody_and_takes_nothing_more() -> None:
    core = Core()
    first, held, behind = core.add("A", outputs=["a"]), core.add("B", "b", ["c"]), core.add("C", "c")
    fine, got, awaited = core.add("D", "a"), core.get("e"), core.get("a")
    core.executor.endings.close(core.session(), 1.0)
    assert errors_of(held, behind, got) == [
        (424, "nobody_produces"),
        (424, "input_failed"),
        (424, "nobody_produces"),
    ]
    with pytest.raises(ConflictError) as refused:
        core.add("E")
    assert refused.value.code == "session_closed"
    with pytest.raises(ConflictError):
        core.executor.variables.set_value(core.session(), "b", "x", 1.0)
    core.run(first, "x", now_s=2.0)
    assert (awaited.told, owner(fine).ready is not None) == (["x"], True)
    check(core.executor)


async def test_a_session_is_closed_over_http() -> None:
    async with served_calls() as served:
        held = await served.chat("Use {{code}}", inputs="code")
        closed = await served.send("/v1/sessions/s/close", {})
        assert closed.json == {"id": "s", "object": "session.closed", "closed": True}
        assert held.refusal == (424, "nobody_produces")
        assert (await served.chat("Write", output="code")).refusal == (409, "session_closed")


# A client that computes a value itself, or wants no more.


async def test_a_client_sets_an_error() -> None:
    async with served_calls() as served:
        held, got = await served.chat("Use {{code}}", inputs="code"), await served.get("code")
        body = {"session_id": "s", "semantic_var_id": "code", "error": "the file is missing"}
        assert (await served.send("/v1/variables", body)).json["state"] == "failed"
        assert [one.refusal for one in (held, got)] == [(424, "input_failed"), (424, "variable_failed")]
        assert "the file is missing" in got.json["error"]["message"]
        await served.value("code", "x")
        assert (await served.get("code")).json["value"] == "x"
        assert (await served.send("/v1/variables", body)).refusal == (409, "double_producer")
        assert (await served.send("/v1/variables", {**body, "value": "x"})).status == 400


async def test_a_call_is_cancelled_by_its_id() -> None:
    async with served_calls() as served:
        submitted = await served.submit("Write {{code}}", "code")
        held = await served.chat("Use {{code}}", inputs="code")
        path = f"/v1/sessions/s/calls/{submitted.json['id']}"
        assert (await served.send(path, method="DELETE")).json["cancelled"]
        assert (held.refusal, served.engine.running) == ((424, "input_failed"), {})
        assert (await served.send(path, method="DELETE")).refusal == (404, "call_not_found")


async def test_a_cancelled_calls_client_is_told() -> None:
    async with served_calls() as served:
        running = await served.chat("Write", output="code")
        (call_id,) = next(iter(served.executor.sessions)).calls
        await served.send(f"/v1/sessions/s/calls/{call_id}", method="DELETE")
        assert (running.refusal, served.engine.running) == ((424, "cancelled"), {})


def test_what_was_cancelled_may_succeed_when_it_is_sent_again() -> None:
    core = Core()
    calls, got = [core.add("A", outputs=["a"]), core.add("B", "a", ["b"])], core.get("b")
    core.executor.cancel(calls[0], 1.0)
    errors: list[Any] = [*(owner(call).error for call in calls), *got.told]
    assert [(error.code, error.transient) for error in errors] == [
        ("cancelled", True), ("input_failed", True), ("variable_failed", True)
    ]  # fmt: skip
    assert all(cause.transient for error in errors for cause in error.causes)


# A client that has gone.


async def left(served: Served) -> None:
    """A client leaves a running call with an output."""
    running = await served.chat("Write", output="code")
    await running.leave()
    assert list(served.engine.running) == ["Write"]


async def test_a_client_that_comes_back_in_time_gets_its_answer() -> None:
    async with served_calls(gone_grace_s=0.05) as served:
        await left(served)
        again = await served.chat("Write", output="code")
        await asyncio.sleep(0.1)
        await served.engine.answer("Write", "x")
        assert (again.text, served.engine.delivered) == ("x", ["Write"])


async def test_the_call_of_a_client_that_does_not_come_back_is_cancelled() -> None:
    async with served_calls(gone_grace_s=0.05) as served:
        await left(served)
        await asyncio.sleep(0.1)
        await settle()
        assert served.engine.running == {}


@pytest.mark.parametrize("get_ends_first", [False, True])
def test_a_get_that_ends_does_not_shorten_the_grace_of_another_client(get_ends_first: bool) -> None:
    core = Core(gone_grace_s=10)
    call, waiting = core.add("A", outputs=["a"], is_answered=True), core.get("a")
    if get_ends_first:
        core.executor.variables.release(core.session(), waiting.getter, 1.0)
    core.executor.leave([call], 1.0)
    core.executor.variables.release(core.session(), waiting.getter, 2.0)
    core.elapse(10.9)
    assert (owner(call).error, call.has_reader) == (None, False)
    core.elapse(11.0)
    assert errors_of(call) == [(424, "cancelled")]


def test_a_held_call_whose_client_is_there_keeps_its_session() -> None:
    core = Core(ttl_s=10, hold_timeout_s=1e6)
    held = core.add("A", "a", is_answered=True)
    assert core.executor.endings.expire(11.0) == 0
    held.clients = 0
    assert core.executor.endings.expire(30.0) == 1


async def test_a_get_may_come_before_its_session() -> None:
    async with served_calls() as served:
        got = await served.get("code")
        await served.chat("Write", output="code")
        await served.engine.answer("Write", "x")
        assert got.json["value"] == "x"
