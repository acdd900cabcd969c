"""Annotations on the routes of sessions: each acts, or is refused with where it belongs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from plait.gateway.calls.annotations import TAKEN
from plait.policy.types import Objective, Slo
from tests.gateway.guests.programs.chained_gateway import CHAT, GET, SUBMIT, Exchange, Served, served_calls, settle

PROGRAMS = "/v1/programs"
SUBMITTED = {
    "session_id": "s",
    "model": "m",
    "prompt": "Say{{a}}",
    "placeholders": [{"name": "a", "in_out": True}],
}
GOT = {"session_id": "s", "semantic_var_id": "a"}
SOME_CALL = {name: value for name, value in SUBMITTED.items() if name != "session_id"}
PROGRAM = {"session": "s", "calls": [SOME_CALL], "gets": {"a": None}}
BODIES: Mapping[str, Any] = {
    "/v1/sessions": {"session_id": "s"},
    "/v1/variables": {"session_id": "s", "semantic_var_id": "x", "value": "1"},
    GET: GOT,
    SUBMIT: SUBMITTED,
    PROGRAMS: PROGRAM,
}
VALUES = {
    "session": "s",
    "inputs": "x",
    "output": "a",
    "when": 'x == "1"',
    "objective": "latency",
    "session_objective": "throughput",
    "slo_ttft_ms": "100",
    "slo_tpot_ms": "50",
    "slo_jct_ms": "60000",
    "priority": "1",
    "durable": "false",
    "receipt": "true",
}
MEANT = {path: TAKEN[path] for path in BODIES} | {PROGRAMS: TAKEN["/v1/programs with gets"]}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls() as served:
        yield served


def error(exchange: Exchange) -> Any:
    return exchange.status, exchange.json["error"]["param"], exchange.json["error"]["code"]


async def send(served: Served, path: str, headers: Mapping[str, str], body: Any = None) -> Exchange:
    named = {f"plait_{key}": value for key, value in headers.items()}
    return await served.send(path, BODIES[path] if body is None else body, **named)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("key", VALUES)
async def test_an_annotation_acts_or_is_refused_with_its_place(served: Served, path: str, key: str) -> None:
    asked = await send(served, path, {key: VALUES[key]})
    if key in MEANT[path]:
        assert not asked.messages or asked.status == 200
    else:
        place = f"plait-{key.replace('_', '-')}"
        assert error(asked) == (400, place, "invalid_annotation")
        assert " belongs to " in asked.json["error"]["message"]
        assert (len(served.executor.sessions), served.engine.running) == (0, {})


@pytest.mark.parametrize("path", [*BODIES, "/v1/sessions/s", "/v1/variables/s/x", "/v1/models", "/v1/responses/r"])
@pytest.mark.parametrize(("key", "value"), [("nonsense", "1"), ("session", "a b"), ("priority", "high")])
async def test_an_unknown_name_or_value_is_refused_everywhere(served: Served, path: str, key: str, value: str) -> None:
    method, body = ("POST", BODIES[path]) if path in BODIES else ("GET", None)
    asked = await served.send(path, body, method=method, **{f"plait_{key}": value})
    assert error(asked) == (400, f"plait-{key}", "invalid_annotation")


@pytest.mark.parametrize("path", [*BODIES, "/v1/sessions/s", "/v1/variables/s/x"])
async def test_another_session_than_the_requests_own_is_refused(served: Served, path: str) -> None:
    await send(served, "/v1/variables", {})
    method, body = ("POST", BODIES[path]) if path in BODIES else ("GET", None)
    asked = await served.send(path, body, method=method, plait_session="other")
    assert error(asked) == (400, "plait-session", "invalid_annotation")
    if method == "GET":
        assert (await served.send(path, method="GET", plait_session="s")).status == 200


async def test_a_session_that_only_the_header_names_is_refused(served: Served) -> None:
    for path, body in (("/v1/sessions", {}), (PROGRAMS, {"calls": [SOME_CALL]})):
        assert error(await send(served, path, {"session": "s"}, body)) == (400, "plait-session", "invalid_annotation")


async def test_what_an_sdk_sends_with_each_call_is_read_and_left_on_the_routes_that_it_reads(served: Served) -> None:
    for path in ("/v1/models", "/v1/models/m"):
        assert (await served.send(path, method="GET", plait_session="s", plait_priority="1")).status == 200


async def test_a_sessions_objective_is_that_of_header_or_body(served: Served) -> None:
    made = await send(served, "/v1/sessions", {"session_objective": "latency"})
    assert made.json["objective"] == "latency"
    both = {"session_id": "s", "objective": "latency"}
    assert (await send(served, "/v1/sessions", {"session_objective": "latency"}, both)).status == 200
    asked = await send(served, "/v1/sessions", {"session_objective": "throughput"}, both)
    assert error(asked) == (400, "plait-session-objective", "invalid_annotation")


async def test_a_programs_and_a_submissions_session_objective_acts(served: Served) -> None:
    for path, session, objective in ((PROGRAMS, "s", "latency"), (SUBMIT, "t", "throughput")):
        body = {**BODIES[path], "session" if path == PROGRAMS else "session_id": session}
        await send(served, path, {"session_objective": objective}, body)
        assert (await served.send(f"/v1/sessions/{session}", method="GET")).json["objective"] == objective


async def test_a_submissions_headers_are_its_calls_annotations(served: Served) -> None:
    await send(served, SUBMIT, {"slo_ttft_ms": "100", "priority": "3"})
    call = served.engine.running["Say"][0].call
    assert (call.slo, call.priority) == (Slo(ttft_s=0.1), 3)
    both = await send(served, SUBMIT, {"priority": "3"}, {**SUBMITTED, "plait": {"priority": 4}})
    assert error(both) == (400, "plait-priority", "invalid_annotation")


async def test_a_jct_is_the_criterion_of_a_get(served: Served) -> None:
    await send(served, SUBMIT, {})
    got = await send(served, GET, {"slo_jct_ms": "60000"}, {**GOT, "criteria": {"slo_ttft_ms": 100}})
    (getter,) = next(iter(served.executor.sessions)).getters["a"]
    assert getter.mark == Slo(ttft_s=0.1, jct_s=60.0)
    await served.engine.answer("Say", "yes")
    assert (got.headers[b"plait-slo"], got.json["value"]) == (b"expected", "yes")


@pytest.mark.parametrize(
    ("headers", "criteria", "param"),
    [
        ({"slo_jct_ms": "1000"}, {"jct_ms": 2_000}, "plait-slo-jct-ms"),
        ({"slo_jct_ms": "1000"}, "throughput", "plait-slo-jct-ms"),
        ({"objective": "throughput"}, "latency", "plait-objective"),
        ({"objective": "throughput", "slo_jct_ms": "1"}, None, "plait-objective"),
    ],
)
async def test_criteria_that_disagree_are_refused(
    served: Served, headers: Mapping[str, str], criteria: Any, param: str
) -> None:
    got = await send(served, GET, headers, {**GOT, "criteria": criteria})
    assert error(got) == (400, param, "invalid_annotation")
    asked = await send(served, PROGRAMS, headers, {**PROGRAM, "gets": {"a": criteria}})
    assert error(asked) == (400, param, "invalid_annotation")
    assert len(served.executor.sessions) == 0


def chain(**gets: Any) -> Any:
    """Two calls, of which the second takes the first one's output."""
    second = [{"name": "a"}, {"name": "b", "in_out": True}]
    calls = [SOME_CALL, {"model": "m", "prompt": "{{a}} is{{b}}", "placeholders": second}]
    return {"session": "s", "calls": calls, "gets": gets}


async def test_a_programs_jct_is_the_criterion_of_its_last_gets(served: Served) -> None:
    asked = await send(served, PROGRAMS, {"slo_jct_ms": "60000"}, chain(a="latency", b=None))
    getters = next(iter(served.executor.sessions)).getters
    assert getters["a"][0].mark is Objective.LATENCY
    assert getters["b"][0].mark == Slo(jct_s=60.0)
    await served.engine.answer("Say", "it")
    (prompt,) = served.engine.running
    await served.engine.answer(prompt, "good")
    assert (asked.headers[b"plait-slo"], asked.json["values"]) == (b"expected", {"a": "it", "b": "good"})


async def test_a_first_get_may_have_a_shorter_jct_than_the_program(served: Served) -> None:
    criteria = {"slo_jct_ms": 5_000}
    await send(served, PROGRAMS, {"slo_jct_ms": "60000"}, chain(a=criteria, b=None))
    getters = next(iter(served.executor.sessions)).getters
    assert [getters[name][0].jct_s for name in ("a", "b")] == [5.0, 60.0]


async def test_a_program_without_gets_has_nothing_for_a_jct(served: Served) -> None:
    asked = await send(served, PROGRAMS, {"slo_jct_ms": "60000"}, {"session": "s", "calls": [SOME_CALL]})
    assert error(asked) == (400, "plait-slo-jct-ms", "invalid_annotation")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_job_that_came_late_has_missed_its_jct(served: Served, streamed: bool) -> None:
    late = await send(served, PROGRAMS, {"slo_jct_ms": "1"}, {**PROGRAM, "stream": streamed})
    await asyncio.sleep(0.01)
    got = await send(served, GET, {"slo_jct_ms": "1"}, {**GOT, "stream": streamed})
    await served.engine.answer("Say", "yes")
    for asked in (late, got):
        if streamed:
            *_, last = [line for line in asked.body.splitlines() if line.startswith(b"data: {")]
            assert b'"slo":"missed"' in last
        else:
            assert asked.headers[b"plait-slo"] == b"missed"


async def test_a_get_that_gives_up_within_its_jct_is_at_risk(served: Served) -> None:
    asked = await send(served, PROGRAMS, {"slo_jct_ms": "60000"}, {**PROGRAM, "timeout_s": 0.01, "stream": True})
    await asyncio.sleep(0.03)
    await settle()
    assert b'"slo":"at-risk"' in asked.body


async def test_without_a_jct_nothing_is_said(served: Served) -> None:
    asked = await send(served, PROGRAMS, {})
    await served.engine.answer("Say", "yes")
    assert b"plait-slo" not in asked.headers


async def test_a_count_of_tokens_takes_no_variables(served: Served) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    asked = await served.send("/v1/messages/count_tokens", body, plait_session="s", plait_output="a")
    assert (asked.status, asked.json["error"]["type"]) == (400, "invalid_request_error")


async def test_a_chats_wrong_annotation_has_a_code(served: Served) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    asked = await served.send(CHAT, body, plait_slo_ttft_ms="soon")
    assert error(asked) == (400, "plait-slo-ttft-ms", "invalid_annotation")


@pytest.mark.parametrize("name", ["slo_ttft_ms", "slo-ttft-ms", "slo_jct_ms", "slo-tpot-ms"])
@pytest.mark.parametrize("path", [CHAT, SUBMIT, "/v1/messages", "/v1/embeddings"])
async def test_an_annotation_at_the_top_of_a_body_is_refused(served: Served, path: str, name: str) -> None:
    body = SUBMITTED if path == SUBMIT else {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    asked = await served.send(path, {**body, name: 300})
    assert asked.status == 400
    assert asked.json["error"]["message"] == f"'{name}' is an annotation: put it into the body's 'plait' object"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/sessions", {"ttl": 60}, "unknown field `ttl`; did you mean `ttl_s`?"),
        (PROGRAMS, {"values": {}, "get": {}}, "unknown field `get`; did you mean `gets`?"),
        (GET, {**GOT, "criteria": {"ttft": 1}}, "unknown field `ttft` (in criteria); did you mean `ttft_ms`?"),
        ("/v1/variables", {"session_id": "s", "zzz": 1}, "unknown field `zzz`"),
    ],
)
async def test_an_unknown_field_gets_the_nearest_name(served: Served, path: str, body: Any, said: str) -> None:
    asked = await served.send(path, body)
    assert (asked.status, asked.json["error"]["message"]) == (400, f"Object contains {said}")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/m", "GET, HEAD"),
        ("GET", "/v1/programs", "POST"),
        ("PUT", "/v1/sessions/s", "DELETE, GET, HEAD"),
        ("PATCH", "/v1/responses/r", "DELETE, GET, HEAD"),
        ("POST", "/metrics", "GET, HEAD"),
    ],
)
async def test_a_known_path_with_another_method_says_which(
    served: Served, method: str, path: str, allowed: str
) -> None:
    asked = await served.send(path, method=method)
    assert (asked.refusal, asked.headers[b"allow"]) == ((405, "method_not_allowed"), allowed.encode())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "/v1/conversations",
            "There are no stored conversations here. Continue a response with 'previous_response_id'.",
        ),
        ("/v1/conversations/c/items", "There are no stored conversations here. Continue a response with "),
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/v1/nothing/like/it", "Unknown path: POST /v1/nothing/like/it."),
    ],
)
async def test_an_unknown_path_says_what_is_near_or_missing(served: Served, path: str, said: str) -> None:
    asked = await served.send(path, {})
    assert asked.refusal == (404, "not_found")
    assert said in asked.json["error"]["message"]
    assert "moderations" not in asked.json["error"]["message"]


async def test_the_admin_api_says_what_it_needs(served: Served) -> None:
    asked = await served.send("/admin/status", method="GET")
    assert asked.refusal == (404, "not_found")
    assert "server.admin_key" in asked.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (GET, {**GOT, "criteria": "quick"}, "Invalid enum value 'quick' (in criteria); it takes latency, throughput"),
        (
            "/v1/programs",
            {"calls": [], "gets": {"a": "quick"}},
            "Invalid enum value 'quick' (in gets); it takes latency, throughput",
        ),
        ("/v1/sessions", {"objective": "x"}, "Invalid enum value 'x' (in objective); it takes latency, throughput"),
    ],
)
async def test_a_word_that_a_field_does_not_take_gets_the_words_that_it_takes(
    served: Served, path: str, body: Any, said: str
) -> None:
    assert (await served.send(path, body)).json["error"]["message"] == said
