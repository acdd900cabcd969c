"""Sessions, variables, gets and submitted prompts over their routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from plait.policy.types import Slo
from tests.gateway.guests.programs.chained_gateway import GET, SUBMIT, Served, events, served_calls, settle
from tests.invariants import check
from tests.waiting import WITHIN_S

A = {"name": "a", "in_out": True}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls() as served:
        yield served


# Sessions and variables.


async def test_a_session_is_made_shown_and_deleted(served: Served) -> None:
    made = (await served.send("/v1/sessions", {"ttl_s": 60})).json
    assert (made["object"], made["expires_at"] - made["created_at"]) == ("session", 60)
    named = (await served.send("/v1/sessions", {"session_id": "s"})).json
    assert (named["id"], named["expires_at"] - named["created_at"]) == ("s", 3_600)
    await served.chat("Write {{task}}", inputs="task", output="code")
    await served.value("x", "1")
    shown = (await served.send("/v1/sessions/s", method="GET")).json
    producer = shown["variables"][0]["producer"]
    assert shown["calls"] == {"waiting": 1, "ready": 0, "running": 0}
    assert shown["variables"] == [
        {"semantic_var_id": "code", "state": "pending", "producer": producer, "error": None},
        {"semantic_var_id": "x", "state": "set", "producer": "client", "error": None},
        {"semantic_var_id": "task", "state": "empty", "producer": None, "error": None},
    ]
    await served.value("task", "it")
    await served.engine.lose("Write it")
    shown = (await served.send("/v1/sessions/s", method="GET")).json
    assert shown["variables"][0]["state"] == "failed"
    cause = {
        "call": producer,
        "engine": "e",
        "transform": None,
        "variable": "code",
        "message": "engine e: connection lost",
        "transient": True,
    }
    error = shown["variables"][0]["error"]
    assert (error["code"], error["transient"], error["causes"]) == ("variable_failed", True, [cause])
    read = (await served.send("/v1/variables/s/code", method="GET")).json
    assert (read["state"], read["value"], read["error"]) == ("failed", None, error)
    assert (await served.get("code")).json["error"] == error


async def test_variables_are_declared_set_and_read(served: Served) -> None:
    made = (await served.send("/v1/variables", {"session_id": "s"})).json
    assert made["semantic_var_id"].startswith("v_")
    assert (made["state"], made["value"]) == ("empty", None)
    assert (await served.value("x", "1")).json["value"] == "1"
    assert (await served.value("x", "1")).json == (await served.value("x", "1")).json
    assert (await served.value("x", "2")).refusal == (409, "double_producer")
    read = (await served.send("/v1/variables/s/x", method="GET")).json
    assert read == {
        "object": "semantic_variable",
        "semantic_var_id": "x",
        "session_id": "s",
        "state": "set",
        "value": "1",
        "truncated": False,
        "error": None,
    }


async def test_what_a_client_computed_is_answered_again_as_the_first_time(served: Served) -> None:
    for name in ("good", "bad"):
        await served.send("/v1/variables", {"session_id": "s", "semantic_var_id": name, "inputs": ["x"]})
    held = [await served.chat(f"Use {{{{{name}}}}}", inputs=name) for name in ("good", "bad")]
    await served.value("x", "1")
    good = {"session_id": "s", "semantic_var_id": "good", "value": "2"}
    bad = {"session_id": "s", "semantic_var_id": "bad", "error": "no"}
    for body, state in ((good, "set"), (bad, "failed")):
        answers = [(await served.send("/v1/variables", body)).json for _ in range(3)]
        assert [answer["state"] for answer in answers] == [state] * 3
        assert answers[0] == answers[1] == answers[2]
    assert (await served.send("/v1/variables", {**good, "value": "3"})).refusal == (409, "double_producer")
    assert (held[1].refusal, served.engine.delivered) == ((424, "input_failed"), ["Use 2"])
    check(served.executor)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/sessions", {"session_id": "a b"}, "session_id"),
        ("/v1/sessions", {"ttl_s": 0}, "ttl_s"),
        ("/v1/sessions", {"ttl": 60}, "ttl"),
        ("/v1/variables", {"semantic_var_id": "x"}, "session_id"),
        ("/v1/variables", {"session_id": "s", "semantic_var_id": "1"}, "semantic_var_id"),
        ("/v1/variables", {"session_id": "s", "semantic_var_id": "x", "text": "1"}, "text"),
        (GET, {"session_id": "s"}, "semantic_var_id"),
        (GET, {"session_id": "s", "semantic_var_id": "x", "timeout": 1}, "timeout"),
        (GET, {"session_id": "s", "semantic_var_id": "x", "criteria": {"ttft": 1}}, "criteria"),
        (GET, {"session_id": "s", "semantic_var_id": "x", "criteria": "fast"}, "criteria"),
        (GET, {"session_id": "s", "semantic_var_id": "x", "criteria": {"slo_ttft_ms": -1}}, "criteria"),
        (GET, {"session_id": "s", "semantic_var_id": "x", "criteria": {"slo_jct_ms": 1, "jct_ms": 2}}, "criteria"),
        (SUBMIT, {"session_id": "s", "model": "m", "prompt": "", "placeholders": []}, "placeholders"),
        (SUBMIT, {"session_id": "s", "model": "m", "prompt": "{{a}}{{b}}", "placeholders": [A]}, "placeholders"),
        (SUBMIT, {"session_id": "s", "model": "m", "prompt": "{{a}}", "placeholders": [{**A, "x": 1}]}, "placeholders"),
        (SUBMIT, {"session_id": "s", "model": "m", "prompt": "{{a}}", "placeholders": [A], "n": 2}, "n"),
        (
            SUBMIT,
            {"session_id": "s", "model": "m", "messages": [{"role": "user"}], "placeholders": [A]},
            "placeholders",
        ),
    ],
)
async def test_bad_bodies_name_the_field(served: Served, path: str, body: Any, param: str) -> None:
    refused = await served.send(path, body)
    assert (refused.status, refused.json["error"]["param"]) == (400, param)
    assert param in refused.json["error"]["message"]
    assert not list(served.executor.sessions)


# Get.


async def test_a_get_waits_and_one_for_something_known_does_not(served: Served) -> None:
    await served.send("/v1/sessions", {"session_id": "s"})
    waiting = await served.get("code", criteria="latency")
    await served.chat("Write", output="code")
    assert served.engine.running["Write"][0].call.slo == Slo(1.0, 0.04, is_deduced=True)
    await served.engine.answer("Write", "x")
    assert waiting.json == (await served.get("code")).json
    assert waiting.json["value"] == "x"


async def test_a_get_gives_up_after_its_time_and_may_be_repeated(served: Served) -> None:
    await served.send("/v1/sessions", {"session_id": "s"})
    waiting = await served.get("x", timeout_s=0.001)
    await waiting.task
    assert waiting.refusal == (408, "get_timeout")
    await served.value("x", "1")
    assert (await served.get("x")).json["value"] == "1"


@pytest.mark.parametrize("prefix", ["slo_", ""])
async def test_explicit_criteria_reach_the_call(served: Served, prefix: str) -> None:
    await served.send("/v1/sessions", {"session_id": "s"})
    waiting = await served.get("code", criteria={f"{prefix}ttft_ms": 200, f"{prefix}tpot_ms": 30})
    await served.chat("Write", output="code")
    assert served.engine.running["Write"][0].call.slo == Slo(0.2, 0.03)
    await served.engine.answer("Write", "")
    assert waiting.json["value"] == ""


async def test_a_streamed_get_brings_the_text_as_it_grows(served: Served) -> None:
    await served.send("/v1/sessions", {"session_id": "s"})
    waiting = await served.get("code", stream=True)
    await served.chat("Write", output="code", stream=True)
    await served.engine.begin("Write", "x ")
    await served.engine.begin("Write", "= 1")
    await served.engine.answer("Write", "")
    *deltas, whole, done = events(waiting)
    assert [delta["delta"] for delta in deltas] == ["x ", "= 1"]
    assert {delta["object"] for delta in deltas} == {"semantic_variable.delta"}
    assert (whole["value"], whole["state"], done) == ("x = 1", "set", "[DONE]")


async def test_a_streamed_get_of_a_transformed_text_brings_it_whole(served: Served) -> None:
    await served.send("/v1/sessions", {"session_id": "s"})
    waiting = await served.get("code", stream=True)
    await served.chat("Write", output="code; transform=strip", stream=True)
    await served.engine.answer("Write", "  x = 1  ")
    delta, whole, _ = events(waiting)
    assert delta["delta"] == whole["value"] == "x = 1"


async def test_a_streamed_get_of_what_fails_ends_with_an_error(served: Served) -> None:
    await served.send("/v1/sessions", {"session_id": "s"})
    waiting = await served.get("code", stream=True)
    await served.chat("Write", output="code")
    await served.engine.lose("Write")
    (last,) = events(waiting)
    assert last["error"]["code"] == "variable_failed"
    assert [(cause["engine"], cause["variable"]) for cause in last["error"]["causes"]] == [("e", "code")]
    assert (await served.get("code", stream=True)).refusal == (424, "variable_failed")


# Submit.


async def test_a_submitted_prompt_runs_output_after_output(served: Served) -> None:
    made = (await served.submit("Do {{task}}: {{code}} Test: {{test}}", "code", "test", inputs=("task",))).json
    assert made["outputs"] == [{"name": name, "semantic_var_id": name} for name in ("code", "test")]
    assert (made["object"], made["session_id"], served.engine.running) == ("submission", "s", {})
    await served.value("task", "it")
    waiting = await served.get("test")
    await served.engine.answer("Do it: ", "x = 1")
    assert (await served.get("code")).json["value"] == "x = 1"
    ((prompt, (asked, _, _)),) = served.engine.running.items()
    assert (prompt, asked.slot.continues_on) == ("Do it: |x = 1 Test:", "e")
    assert asked.call.call_id == f"{made['id']}.1"
    await served.engine.answer(prompt, "fine")
    assert waiting.json["value"] == "fine"


async def test_a_submitted_chat_runs_turn_after_turn_on_one_engine(served: Served) -> None:
    said = [("system", "You code."), ("user", "{{task}}"), ("assistant", "{{code}}"), ("user", "Test {{code}}")]
    messages = [{"role": role, "content": text} for role, text in (*said, ("assistant", "Here: {{test}}"))]
    await served.submit(messages, "code", "test", inputs=("task",))
    await served.value("task", "Do it")
    await served.engine.answer("You code.|Do it", "x = 1")
    ((prompt, (asked, _, _)),) = served.engine.running.items()
    assert (prompt, asked.slot.continues_on) == ("You code.|Do it|x = 1|Test x = 1|Here:", "e")
    await served.engine.answer(prompt, "assert x")
    assert (await served.get("test")).json["value"] == "assert x"


async def test_a_submitted_call_goes_on_by_itself_until_its_session_ends(served: Served) -> None:
    await served.submit("Write {{code}}", "code")
    waiting = await served.get("code")
    await waiting.leave()
    assert list(served.engine.running) == ["Write "]
    await served.send("/v1/sessions/s", method="DELETE")
    assert served.engine.running == {}


async def test_a_submission_is_known_again(served: Served) -> None:
    made = [(await served.submit("Write {{code}}", "code")).json for _ in range(2)]
    assert made[0] == made[1]
    assert served.engine.delivered == ["Write "]
    assert (await served.submit("Write more {{code}}", "code")).refusal == (409, "double_producer")


async def test_a_submitted_call_whose_second_step_fails_keeps_its_first_output(served: Served) -> None:
    await served.submit("{{a}} and {{b}}", "a", "b", chat=False)
    await served.engine.answer("", "one")
    await served.engine.lose("one and")
    assert (await served.get("a")).json["value"] == "one"
    assert (await served.get("b")).refusal == (424, "variable_failed")


async def test_a_submission_with_a_failed_input_fails_with_it(served: Served) -> None:
    await served.chat("Write", output="code")
    await served.engine.lose("Write")
    assert (await served.submit("{{code}} {{test}}", "test", inputs=("code",))).status == 200
    refused = await served.get("test")
    assert "its input code failed" in refused.json["error"]["message"]


async def test_each_step_has_its_share_of_the_time(served: Served) -> None:
    await served.submit("{{a}} {{b}}", "a", "b", plait={"slo_jct_ms": 10_000, "slo_ttft_ms": 300})
    slo = served.engine.running[""][0].call.slo
    assert slo is not None
    assert slo.jct_s == pytest.approx(5.0, abs=0.5)
    await served.engine.answer("", "x")
    slo = served.engine.running["|x "][0].call.slo
    assert slo is not None
    assert slo.jct_s == pytest.approx(10.0, abs=0.5)
    assert slo.ttft_s == 0.3


async def test_a_get_that_waits_counts_as_a_request_and_its_body_does_not(served: Served) -> None:
    bodies = served.gateway.kernel.bodies
    waiting = await served.get("never")
    assert (list(bodies._requests.values()), bodies._bytes) == ([1], {})
    bodies.serve(connections=1)
    refused = await served.get("never")
    await asyncio.wait_for(refused.task, WITHIN_S)
    assert refused.refusal == (429, "too_many_open_requests")
    waiting.task.cancel()
    await settle()
    assert bodies._requests == {}
