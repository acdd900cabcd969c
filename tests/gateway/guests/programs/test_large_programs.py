"""Programs of many calls: in slices of the event loop, and as a whole for everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.programs.core.consequences import AT_ONCE
from plait.gateway.intake import turns
from tests.gateway.guests.programs.chained_gateway import Exchange, Served, served_calls, settle

CALLS = 100


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """A piece of work takes a fifth of a slice."""
    async with served_calls() as served:
        pieces = count()
        monkeypatch.setattr(turns, "time", SimpleNamespace(thread_time=lambda: next(pieces) / 5))
        monkeypatch.setattr(turns, "SLICE_S", 1.0)
        yield served


def program(calls: int = CALLS, **more: Any) -> dict[str, Any]:
    """Calls that all need one value."""
    task, done = {"name": "task"}, {"name": "done", "in_out": True}
    made = []
    for number in range(calls):
        named = [task, {**done, "semantic_var_id": f"v{number}"}]
        made.append({"model": "m", "prompt": f"{number} {{{{task}}}} {{{{done}}}}", "placeholders": named})
    return {"session": "s", "values": {"task": "it"}, "calls": made, "gets": {"v0": None}, **more}


async def begun(served: Served, body: dict[str, Any]) -> Exchange:
    """The program has begun to enter, and no more."""
    exchange = await served.send("/v1/programs", body)
    entrance = served.gateway.house[ChainedCalls].runner.entrance
    for _ in range(1_000):
        if entrance._sessions:
            assert served.engine.delivered == []
            return exchange
        await asyncio.sleep(0)
    raise AssertionError("it does not begin to enter")


async def until_run(served: Served, calls: int) -> None:
    for _ in range(1_000):
        if len(served.engine.delivered) == calls:
            return
        await settle()
    raise AssertionError(f"{len(served.engine.delivered)} calls run")


async def until_running(served: Served, prompt: str) -> None:
    for _ in range(1_000):
        if prompt in served.engine.running:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{prompt} does not run")


def calls_of(served: Served) -> int:
    return sum(len(session.calls) for session in served.executor.sessions)


async def test_other_requests_are_served_while_it_enters_and_none_of_it_runs_before_it_is_whole(served: Served) -> None:
    await begun(served, program())
    seen = set[int]()
    for number in count():
        other = await served.chat(f"Hi {number}", session=f"other{number}", output="a")
        await until_running(served, f"Hi {number}")
        await served.engine.answer(f"Hi {number}", "Hello")
        assert other.text == "Hello"
        if calls_of(served) == CALLS:
            break
        assert len(served.engine.delivered) == number + 1, "a call of it runs before all are there"
        seen.add(calls_of(served))
    assert seen > {0}, "it enters bit by bit"
    await until_run(served, CALLS + number + 1)


async def test_requests_for_its_session_wait_until_it_is_whole(served: Served) -> None:
    await begun(served, program())
    state = await served.send("/v1/sessions/s", method="GET")
    assert state.messages == []
    await state.begun.wait()
    counts = state.json["calls"]
    assert sum(counts.values()) == CALLS
    assert len(state.json["variables"]) == CALLS + 1


@pytest.mark.parametrize("method", ["DELETE", "POST"])
async def test_its_session_is_ended_after_it_has_entered(served: Served, method: str) -> None:
    answer = await begun(served, program())
    end = "/v1/sessions/s" if method == "DELETE" else "/v1/sessions/s/close"
    ended = await served.send(end, method=method)
    await ended.begun.wait()
    assert ended.status == 200
    if method == "DELETE":
        await answer.begun.wait()
        assert answer.refusal == (410, "session_ended")
    else:
        await until_run(served, CALLS)


async def test_programs_of_a_tenant_enter_one_after_another(served: Served) -> None:
    await begun(served, program(session="one"))
    second = await served.send("/v1/programs", program(session="two"))
    other = await served.send("/v1/programs", program(1, session="three"), key="two")
    await until_run(served, 2 * CALLS + 1)
    order = [text.split(" ", 1)[0] for text in served.engine.delivered]
    assert order.count("99") == 2
    assert second.messages == other.messages == []


async def test_of_a_program_that_is_refused_nothing_is_there(served: Served) -> None:
    wrong = program()
    wrong["calls"].append({**wrong["calls"][0], "prompt": "again {{task}} {{done}}"})
    refused = await served.send("/v1/programs", wrong)
    await refused.begun.wait()
    assert refused.refusal == (409, "double_producer")
    assert len(served.executor.sessions) == 0
    assert served.engine.delivered == []


async def test_a_tenants_limits_hold_for_programs_that_come_together() -> None:
    async with served_calls(max_waiting_calls=CALLS) as served:
        held = [program(session=f"s{number}", values={}, external=["task"]) for number in range(3)]
        answers = [await served.send("/v1/programs", body) for body in held]
        for _ in range(50):
            await settle()
        assert calls_of(served) == CALLS
        assert [answer.refusal for answer in answers if answer.messages] == [(429, "too_many_waiting_calls")] * 2


async def test_a_gateway_that_stops_meanwhile_ends_it(served: Served) -> None:
    answer = await begun(served, program())
    while not calls_of(served):
        await settle()
    await served.gateway.house[ChainedCalls].close()
    await answer.begun.wait()
    assert answer.refusal == (410, "session_ended")
    assert calls_of(served) == 0


async def test_an_event_starts_so_many_calls_and_the_next_goes_on(served: Served) -> None:
    first = {"model": "m", "prompt": "{{task}}", "placeholders": [{"name": "task", "in_out": True}]}
    body = program()
    await served.send("/v1/programs", {**body, "values": {}, "calls": [first, *body["calls"]]})
    await until_run(served, 1)
    running = len(served.gateway.house[ChainedCalls].runner.tasks)
    answered = asyncio.ensure_future(served.engine.answer("", "it"))
    most = 0
    while not answered.done():
        before = len(served.gateway.house[ChainedCalls].runner.tasks)
        await asyncio.sleep(0)
        most = max(most, len(served.gateway.house[ChainedCalls].runner.tasks) - before)
    assert running == 1
    assert 0 < most <= AT_ONCE
    await until_run(served, CALLS + 1)
