"""Whole programs over their route: answers, refusals and departures."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from plait.policy.types import Objective, Slo
from tests.gateway.guests.programs.chained_gateway import Exchange, Served, served_calls, settle

PATH = "/v1/programs"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls(gather_ms=60_000) as served:
        yield served


def call(prompt: str, *outputs: str, inputs: str = "", **more: Any) -> dict[str, Any]:
    named = [{"name": name, "in_out": True} for name in outputs] + [{"name": name} for name in inputs.split()]
    return {"model": "m", "prompt": prompt, "placeholders": named, **more}


async def run(served: Served, *calls: dict[str, Any], **more: Any) -> Exchange:
    return await served.send(PATH, {"session": "s", "calls": calls, **more})


# Answers.


async def test_it_answers_with_all_values(served: Served) -> None:
    steps = [
        call("Do {{task}}: {{code}}", "code", inputs="task"),
        call("Test {{code}} {{test}}", "test", inputs="code"),
    ]
    got = await run(served, *steps, values={"task": "it"}, gets={"test": "latency", "code": None})
    await served.engine.answer("Do it: ", "x = 1")
    await served.engine.answer("Test x = 1 ", "fine", "length")
    assert (got.status, got.json) == (
        200,
        {
            "object": "program",
            "session": "s",
            "values": {"test": "fine", "code": "x = 1"},
            "truncated": ["test"],
            "errors": {},
        },
    )


async def test_all_of_the_first_stage_is_booked_with_its_group_and_objective(served: Served) -> None:
    maps = [call(f"Map {number} {{{{m{number}}}}}", f"m{number}") for number in range(16)]
    names = [f"m{number}" for number in range(16)]
    reduce = call("".join(f"{{{{{name}}}}}" for name in names) + " so {{r}}", "r", inputs=" ".join(names))
    got = await run(served, *maps, reduce, gets={"r": "latency"})
    deliveries = {prompt: asked for prompt, (asked, _, _) in served.engine.running.items()}
    assert len(deliveries) == 16
    assert {asked.call.objective for asked in deliveries.values()} == {Objective.LATENCY}
    groups = {asked.call.group for asked in deliveries.values()}
    assert [group.calls for group in groups if group is not None] == [16]
    for prompt in deliveries:
        await served.engine.answer(prompt, "x")
    await served.engine.answer("x" * 16 + " so ", "done")
    assert got.json["values"] == {"r": "done"}


async def test_annotations_and_figures_reach_the_calls(served: Served) -> None:
    calls = [call("A {{a}}", "a", plait={"slo_ttft_ms": 300, "priority": 3}), call("B {{b}}", "b")]
    await run(served, *calls, gets={"b": {"slo_ttft_ms": 200, "slo_tpot_ms": 30}})
    sent = {prompt: asked.call for prompt, (asked, _, _) in served.engine.running.items()}
    assert (sent["A "].slo, sent["A "].priority, sent["B "].slo) == (Slo(ttft_s=0.3), 3, Slo(0.2, 0.03))


async def test_values_that_are_no_texts_become_json(served: Served) -> None:
    await run(served, call("{{v}} {{out}}", "out", inputs="v"), values={"v": {"n": [1, None]}})
    assert list(served.engine.running) == ['{"n":[1,null]} ']


async def test_without_gets_it_answers_at_once(served: Served) -> None:
    got = await served.send(PATH, {"calls": [call("A {{a}}", "a")]})
    assert (got.status, got.json["object"], list(served.engine.running)) == (202, "program", ["A "])
    again = await served.send(PATH, {"session": got.json["session"], "gets": {"a": "latency"}})
    await served.engine.answer("A ", "x")
    assert again.json["values"] == {"a": "x"}


async def test_what_failed_has_its_error_beside_the_values(served: Served) -> None:
    calls = [call("A {{a}}", "a"), call("B {{b}}", "b"), call("{{b}} C {{c}}", "c", inputs="b")]
    got = await run(served, *calls, gets={"c": None, "a": None})
    await served.engine.lose("B ")
    await served.engine.answer("A ", "x")
    assert (got.status, got.json["values"]) == (200, {"a": "x"})
    error = got.json["errors"]["c"]
    assert (error["code"], [cause["variable"] for cause in error["causes"]]) == ("variable_failed", ["c", "b"])


async def test_without_any_value_it_has_the_first_errors_status(served: Served) -> None:
    got = await run(served, call("A {{a}}", "a"), gets={"a": None})
    await served.engine.lose("A ")
    assert got.refusal == (424, "variable_failed")
    assert (got.json["values"], list(got.json["errors"])) == ({}, ["a"])


async def test_a_gateway_that_stops_says_nothing_of_values(served: Served) -> None:
    got = await run(served, call("Do {{code}}", "code"), gets={"code": None, "later": None}, external=["later"])
    await served.engine.answer("Do ", "x = 1")
    served.gateway.on_closed()
    await settle()
    assert (got.status, got.json["error"]["code"]) == (503, "gateway_stopping")
    assert got.json["values"] == {"code": "x = 1"}


async def test_nothing_of_a_program_is_left_to_the_garbage_collector(served: Served) -> None:
    """The gateway seldom collects: what a program leaves in cycles would be its growth."""
    for number in range(4):
        if number == 1:  # what is made once is there
            gc.collect()
            gc.disable()
        streams = bool(number % 2)
        session = f"s{number}"
        steps = [call(f"Do {number} {{{{code}}}}", "code"), call("Test {{code}} {{test}}", "test", inputs="code")]
        got = await served.send(
            PATH, {"session": session, "calls": steps, "gets": {"test": None, "code": None}, "stream": streams}
        )
        await served.engine.answer(f"Do {number} ", "x = 1")
        await served.engine.answer("Test x = 1 ", "fine")
        await settle()
        assert got.status == 200
        await served.send(f"/v1/sessions/{session}", method="DELETE")
    await settle()
    del got
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        assert [one for one in gc.garbage if type(one).__module__.startswith("plait.")] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_what_has_not_come_in_time_may_still_come(served: Served) -> None:
    got = await run(served, call("A {{a}}", "a"), gets={"a": None}, timeout_s=0.001)
    await got.task
    assert got.refusal == (408, "get_timeout")
    await served.engine.answer("A ", "x")
    assert (await run(served, gets={"a": None})).json["values"] == {"a": "x"}


async def test_deleting_its_session_cancels_it(served: Served) -> None:
    got = await run(served, call("A {{a}}", "a"), gets={"a": None})
    await served.send("/v1/sessions/s", method="DELETE")
    assert (got.refusal, served.engine.running) == ((410, "session_ended"), {})


async def test_a_client_that_leaves_ends_its_gets_alone(served: Served) -> None:
    got = await run(served, call("A {{a}}", "a"), gets={"a": "latency"})
    await got.leave()
    assert (got.messages, list(served.engine.running)) == ([], ["A "])
    assert [session.getters for session in served.executor.sessions] == [{}]


async def test_a_program_that_is_sent_again_runs_once(served: Served) -> None:
    body = {"values": {"x": "1"}, "gets": {"a": None}}
    both = [await run(served, call("{{x}} A {{a}}", "a", inputs="x"), **body) for _ in range(2)]
    await served.engine.answer("1 A ", "y")
    assert served.engine.delivered == ["1 A "]
    assert both[0].json == both[1].json


async def test_who_sends_a_program_again_is_a_client_of_its_calls() -> None:
    calls = [call("A {{a}}", "a"), call("B {{b}}", "b")]
    async with served_calls(gone_grace_s=0.02) as served:
        clients = [await run(served, *calls, gets={"a": None}) for _ in range(2)]
        await clients[0].leave()
        await asyncio.sleep(0.05)
        assert list(served.engine.running) == ["A ", "B "]
        await clients[1].leave()
        await asyncio.sleep(0.05)
        await settle()
        assert served.engine.running == {}


async def test_a_program_may_take_and_get_what_others_produce_later(served: Served) -> None:
    body = {"external": ["theirs"], "gets": {"theirs": None, "a": None}, "ttl_s": 60}
    got = await run(served, call("{{theirs}} A {{a}}", "a", inputs="theirs"), **body)
    await served.value("theirs", "so")
    await served.engine.answer("so A ", "y")
    assert got.json["values"] == {"theirs": "so", "a": "y"}
    assert [session.ttl_s for session in served.executor.sessions] == [60]


# Streams.


def told(exchange: Exchange) -> list[tuple[str, Any]]:
    """The events that a stream has brought."""
    lines = [block.split("\n") for block in exchange.body.decode().split("\n\n") if block.startswith("event: ")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in lines]


async def test_a_stream_brings_texts_as_they_grow_then_values(served: Served) -> None:
    calls = [call("A {{a}}", "a"), call("{{a}} B {{b}}", "b", inputs="a")]
    got = await run(served, *calls, gets={"b": "latency", "a": None}, stream=True)
    await served.engine.begin("A ", "x ")
    await served.engine.begin("A ", "= 1")
    await served.engine.answer("A ", "")
    assert [kind for kind, _ in told(got)] == ["delta", "delta", "value"]
    await served.engine.answer("x = 1 B ", "fine", "length")
    assert (got.status, got.headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    texts = {
        name: "".join(data["delta"] for kind, data in told(got) if kind == "delta" and data["name"] == name)
        for name in "ab"
    }
    assert texts == {"a": "x = 1", "b": "fine"}
    assert [data for kind, data in told(got) if kind in {"value", "failed", "done"}] == [
        {"name": "a", "value": "x = 1", "truncated": False},
        {"name": "b", "value": "fine", "truncated": True},
        {"object": "program", "session": "s"},
    ]


async def test_a_stream_brings_failures_beside_values(served: Served) -> None:
    got = await run(served, call("A {{a}}", "a"), call("B {{b}}", "b"), gets={"a": None, "b": None}, stream=True)
    await served.engine.begin("A ", "x")
    await served.engine.break_off("A ", "y")
    await served.engine.answer("B ", "z")
    kinds = {data["name"]: kind for kind, data in told(got)[:-1]}
    assert (kinds, told(got)[-1][0]) == ({"a": "failed", "b": "value"}, "done")
    (error,) = [data["error"] for kind, data in told(got) if kind == "failed"]
    assert error["code"] == "variable_failed"


async def test_a_stream_whose_time_is_over_says_what_has_not_come(served: Served) -> None:
    got = await run(served, call("A {{a}}", "a"), gets={"a": None}, stream=True, timeout_s=0.001)
    await got.task
    assert [kind for kind, _ in told(got)] == ["failed", "done"]
    assert told(got)[0][1]["error"]["code"] == "get_timeout"


async def test_a_stream_is_refused_with_a_status_and_ends_with_its_client(served: Served) -> None:
    assert (await run(served, gets={"none": None}, stream=True)).refusal == (400, "unknown_variable")
    got = await run(served, call("A {{a}}", "a"), gets={"a": None}, stream=True)
    await got.leave()
    assert [session.getters for session in served.executor.sessions] == [{}]


# Refusals.


GOOD = call("G {{g}}", "g")


@pytest.mark.parametrize(
    ("body", "refusal", "param"),
    [
        ({"call": []}, (400, None), "call"),
        ({"session": "a b"}, (400, None), "session"),
        ({"gets": {"g": "fast"}}, (400, None), "gets"),
        ({"gets": {"none": "latency"}}, (400, "unknown_variable"), "gets.none"),
        ({"values": {"g": "1"}}, (409, "double_producer"), "calls[0].placeholders"),
        ({"calls": [GOOD, call("{{b}}{{a}}", "a")]}, (400, None), "calls[1].placeholders"),
        ({"calls": [GOOD, call("{{b}} {{a}}", "a", inputs="b")]}, (400, "unknown_variable"), "calls[1].placeholders"),
        ({"calls": [GOOD, call("A {{g}}", "g")]}, (409, "double_producer"), "calls[1].placeholders"),
        (
            {"calls": [call("{{b}} {{a}}", "a", inputs="b"), call("{{a}} {{b}}", "b", inputs="a")]},
            (409, "cycle"),
            "calls[1].placeholders",
        ),
        ({"calls": [GOOD, {"prompt": "A {{a}}", "placeholders": []}]}, (400, None), "calls[1].model"),
        ({"calls": [GOOD, call("A {{a}}", "a", n=2)]}, (400, None), "calls[1].n"),
        ({"calls": [GOOD, call("A {{a}}", "a", session_id="s")]}, (400, None), "calls[1].session_id"),
        ({"calls": [GOOD, call("A {{a}}", "a", max_tokens=0)]}, (400, None), "calls[1].max_tokens"),
        ({"calls": [GOOD, {**call("A {{a}}", "a"), "model": "x"}]}, (404, "model_not_found"), "calls[1].model"),
        (
            {"calls": [GOOD, call("A {{a}}", "a", plait={"speed": 1})]},
            (400, "invalid_annotation"),
            "calls[1].plait.speed",
        ),
        (
            {"calls": [{**GOOD, "placeholders": [{"name": "g", "in_out": True, "kind": 1}]}]},
            (400, None),
            "calls[0].placeholders",
        ),
    ],
)
async def test_a_refusal_names_the_place_and_enters_nothing(
    served: Served, body: dict[str, Any], refusal: tuple[int, str | None], param: str
) -> None:
    got = await served.send(PATH, {"session": "s", "calls": [GOOD], **body})
    assert (got.refusal, got.json["error"]["param"]) == (refusal, param)
    assert (served.engine.delivered, len(served.executor.sessions)) == ([], 0)


async def test_a_refusal_names_the_call_by_its_output(served: Served) -> None:
    got = await run(served, GOOD, call("A {{a}}", "a", stop=1, max_tokens=0))
    assert got.json["error"]["message"].startswith("calls[1] (a): ")


async def test_a_program_of_too_many_calls_is_refused() -> None:
    async with served_calls(max_program_calls=2) as served:
        calls = [call(f"{n} {{{{v{n}}}}}", f"v{n}") for n in range(3)]
        got = await run(served, *calls)
        assert (got.refusal, got.json["error"]["param"]) == ((413, "program_too_large"), "calls")
        assert len(served.executor.sessions) == 0
        assert (await run(served, *calls[:2])).status == 202


async def test_limits_hold_for_the_whole_program() -> None:
    async with served_calls(max_waiting_calls=1) as served:
        waiting = [call(f"{{{{g}}}} {{{{w{number}}}}}", f"w{number}", inputs="g") for number in range(2)]
        got = await served.send(PATH, {"calls": [GOOD, *waiting]})
        assert (got.refusal, served.engine.delivered) == ((429, "too_many_waiting_calls"), [])
