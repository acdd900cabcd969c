"""Routes beside completions: what is forwarded, what is translated, and in which shape errors come."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from plait.gateway.calls.routes import CHAT_PATH
from plait.gateway.guests.translation.sealed_thoughts import SealedThoughts
from plait.policy.types import Slo
from tests.call_routes import ROUTES
from tests.gateway.api.fake_relay import CHAT_ANSWER, Api, body_for

RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
HI = {"role": "user", "content": "hi"}
ASK: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hello " * 200},
    MESSAGES: {"messages": [{"role": "user", "content": "hello " * 200}], "max_tokens": 5},
}


def has(api: Api, *routes: str) -> None:
    api.router.health.answered("a", {"m": 1_000}, routes=frozenset(routes))


@pytest.mark.parametrize("path", ASK)
async def test_engines_that_have_the_route_get_the_request_as_it_came(api: Api, path: str) -> None:
    has(api, path)
    asked = await api.asked(path, ASK[path])
    assert (asked.path, asked.route) == (path, path)
    assert asked.call.prompt_tokens > 200
    assert len(asked.call.block_hashes) == asked.call.prompt_tokens // 64, "placed by its prefix"
    sent = body_for(asked, "vllm")
    assert sent == json.dumps({"model": "m", **ASK[path]}).encode()


@pytest.mark.parametrize("path", ASK)
async def test_the_prompt_is_that_of_the_chat_that_it_stands_for(api: Api, path: str) -> None:
    has(api, path)
    forwarded = await api.asked(path, ASK[path])
    chat = await api.asked("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 200}]})
    assert forwarded.call.block_hashes == chat.call.block_hashes


@pytest.mark.parametrize("path", ASK)
@pytest.mark.parametrize(
    ("routes", "more"),
    [([], {}), (None, {})],
    ids=["not there", "not known"],
)
async def test_else_it_is_translated(api: Api, path: str, routes: Any, more: dict[str, str]) -> None:
    if routes is not None:
        has(api, *([path] if routes == "all" else []))
    response = await api.post(path, ASK[path], **more)
    (asked,) = api.relay.deliveries
    assert (asked.path, asked.route) == ("/v1/chat/completions", None)
    assert json.loads(asked.body.original)["messages"][0]["content"] == "hello " * 200
    assert response.status_code == 502, "the fake relay's answer is no completion"
    shape = response.json()
    assert shape["error"]["message"]
    assert ("type" in shape) == (path == MESSAGES)


@pytest.mark.parametrize("routes", [[], list(ASK)], ids=["translated", "forwarded"])
@pytest.mark.parametrize("body", [ASK[MESSAGES], {}], ids=["answered", "refused"])
async def test_anthropics_clients_find_the_request_by_its_name(api: Api, routes: list[str], body: Any) -> None:
    has(api, *routes)
    response = await api.post(MESSAGES, body, x_request_id="mine")
    assert response.headers["request-id"] == "mine"


@pytest.mark.parametrize("routes", [[], list(ASK)], ids=["translated", "forwarded"])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (RESPONSES, {"input": 3}, 400),
        (RESPONSES, {"input": "hi", "model": "other"}, 404),
        (RESPONSES, {"input": "hi", "tools": [{}], "tool_choice": {"type": "function", "name": 3}}, 400),
        (MESSAGES, {"messages": "hi", "max_tokens": 5}, 400),
        (f"{MESSAGES}/count_tokens", {"messages": []}, 400),
        (EMBEDDINGS, {"input": "hi", "model": "other"}, 404),
        (EMBEDDINGS, {"input": "hi", "plait": {"inputs": ["a"]}}, 400),
    ],
)
async def test_a_request_that_is_refused_counts_once_for_its_tenant(
    api: Api, routes: list[str], path: str, body: dict[str, Any], status: int
) -> None:
    has(api, *routes)
    response = await api.post(path, body)
    if response.status_code == 200:  # what an engine is asked is the engine's to refuse
        assert routes
        assert api.no_calls.statuses == []
        return
    assert response.status_code == status
    assert api.no_calls.statuses == [status]
    assert api.relay.deliveries == []


async def test_vectors_are_placed_by_load_on_an_engine_that_has_the_route(api: Api) -> None:
    has(api, EMBEDDINGS)
    asked = await api.asked(EMBEDDINGS, {"input": ["x" * 4_000], "plait": {"session": "s"}})
    assert (asked.route, list(asked.call.block_hashes), asked.session) == (EMBEDDINGS, [], "s")
    assert asked.call.prompt_tokens > 900
    assert b"plait" not in body_for(asked)
    assert (await api.asked("/tokenize", {"prompt": "x" * 4_000})).call.prompt_tokens == 0


BUILT_IN: dict[str, list[dict[str, Any]]] = {
    RESPONSES: [{"type": "web_search"}],
    MESSAGES: [{"type": "web_search_20250305", "name": "web_search"}],
}
ANNOTATED: list[dict[str, str]] = [
    {"plait_priority": "3"},
    {"plait_slo_ttft_ms": "500"},
    {"plait_objective": "latency"},
]


@pytest.mark.parametrize("annotations", ANNOTATED)
@pytest.mark.parametrize("path", ASK)
async def test_an_annotation_takes_nothing_away(api: Api, path: str, annotations: dict[str, str]) -> None:
    has(api, path)
    body = {**ASK[path], "tools": BUILT_IN[path]}
    asked = await api.asked(path, body, **annotations, plait_session="s")
    assert (asked.path, asked.call.session) == (path, "s")
    assert asked.call != (await api.asked(path, body, plait_session="s")).call
    given = json.dumps({"model": "m", **body}).encode()
    stock, sglang = (body_for(asked, kind) for kind in (None, "sglang"))
    assert stock == sglang == given
    told = json.loads(body_for(asked, "vllm"))
    (name,) = (name.removeprefix("plait_slo_").removeprefix("plait_") for name in annotations)
    assert f"plait_{name}" in told.pop("vllm_xargs")
    assert told == json.loads(given)


async def test_an_annotation_in_the_body_is_carried_too(api: Api) -> None:
    has(api, MESSAGES)
    asked = await api.asked(MESSAGES, {**ASK[MESSAGES], "plait": {"priority": 3}})
    assert (asked.path, asked.call.priority) == (MESSAGES, 3)
    assert json.loads(body_for(asked)) == {"model": "m", **ASK[MESSAGES]}


@pytest.mark.parametrize(
    ("routes", "more", "headers", "reason"),
    [
        ([], {}, {}, "because the engine speaks chat completions only"),
        ([RESPONSES], {}, {"plait_session": "s", "plait_output": "x"}, "because a call with inputs, an output or"),
        ([RESPONSES], {"background": True}, {}, "because a response in the background becomes a chat completion"),
    ],
)
async def test_a_refusal_says_why(
    api: Api, routes: list[str], more: dict[str, Any], headers: dict[str, str], reason: str
) -> None:
    has(api, *routes)
    tools = {"tools": BUILT_IN[RESPONSES], "tool_choice": "required"}
    response = await api.post(RESPONSES, {**ASK[RESPONSES], **tools, **more}, **headers)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


async def test_vectors_are_placed_as_they_are_annotated(api: Api) -> None:
    has(api, EMBEDDINGS)
    call = (await api.asked(EMBEDDINGS, {"input": "x"}, plait_slo_ttft_ms="5", plait_priority="2")).call
    assert (call.slo, call.priority) == (Slo(0.005), 2)


async def test_what_a_route_cannot_heed_is_refused(api: Api) -> None:
    response = await api.post(EMBEDDINGS, {"input": "x"}, plait_session="s", plait_output="y")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "plait")


async def test_tokens_are_counted_here_where_engines_do_not(api: Api) -> None:
    has(api, MESSAGES)
    response = await api.post(f"{MESSAGES}/count_tokens", {"messages": ASK[MESSAGES]["messages"]})
    chat = await api.asked("/v1/chat/completions", {"messages": ASK[MESSAGES]["messages"]})
    assert response.json() == {"input_tokens": chat.call.prompt_tokens}


@pytest.mark.parametrize(
    ("body", "kind"), [({"max_tokens": 5}, "invalid_request_error"), ({}, "invalid_request_error")]
)
async def test_errors_have_the_shape_of_the_api(api: Api, body: dict[str, Any], kind: str) -> None:
    response = await api.post(MESSAGES, body)
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == kind
    response = await api.post(MESSAGES, {**ASK[MESSAGES], "model": "other"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_response_continues_what_was_said_before(api: Api) -> None:
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    first = (await api.post(RESPONSES, {"input": "the sky is"})).json()
    second = (await api.post(RESPONSES, {"input": "and grass?", "previous_response_id": first["id"]})).json()
    assert second["previous_response_id"] == first["id"]
    asked = json.loads(api.relay.deliveries[-1].body.original)
    assert [(message["role"], message["content"]) for message in asked["messages"]] == [
        ("user", "the sky is"),
        ("assistant", "blue"),
        ("user", "and grass?"),
    ]
    assert api.stored.get("", second["id"], 0.0).previous == first["id"]


async def test_an_engine_gets_what_was_said_before_a_response(api: Api) -> None:
    has(api, RESPONSES)
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    api.relay.answer = json.dumps({"id": "resp_1", "status": "completed", "output": [search]}).encode()
    body = {"input": "the sky is", "tools": BUILT_IN[RESPONSES]}
    await api.post(RESPONSES, body)
    api.relay.answer = json.dumps({"id": "resp_2", "status": "completed", "output": []}).encode()
    second = (await api.post(RESPONSES, {**body, "input": "and grass?", "previous_response_id": "resp_1"})).json()
    assert second == {"id": "resp_2", "status": "completed", "output": [], "previous_response_id": "resp_1"}
    assert json.loads(api.stored.get("", "resp_2", 0.0).answer) == second
    asked = api.relay.deliveries[-1]
    said = [{"type": "message", "role": "user", "content": text} for text in ("the sky is", "and grass?")]
    assert asked.path == RESPONSES
    assert json.loads(body_for(asked)) == {
        "model": "m",
        "input": [said[0], search, said[1]],
        "tools": BUILT_IN[RESPONSES],
    }


async def test_a_forwarded_response_is_stored_too(api: Api) -> None:
    has(api, RESPONSES)
    api.relay.answer = b'{"id": "resp_1", "status": "completed", "output": []}'
    assert (await api.post(RESPONSES, {"input": [{"role": "user", "content": "hi"}]})).content == api.relay.answer
    assert json.loads(api.stored.get("", "resp_1", 0.0).items) == [{"role": "user", "content": "hi"}]


async def test_without_store_nothing_is_stored_and_unknown_ones_are_refused(api: Api) -> None:
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    first = (await api.post(RESPONSES, {"input": "the sky is", "store": False})).json()
    response = await api.post(RESPONSES, {"input": "x", "previous_response_id": first["id"]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "previous_response_not_found")


TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.mark.parametrize("routes", [[], [RESPONSES]])
async def test_stored_items_are_referred_to(api: Api, routes: list[str]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    choice = {"index": 0, "message": said, "finish_reason": "tool_calls"}
    api.relay.answer = json.dumps({**CHAT_ANSWER, "choices": [choice]}).encode()
    first = (await api.post(RESPONSES, {"input": "hi", "tools": [TOOL]})).json()
    has(api, *routes)
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    result = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    api.relay.answer = json.dumps(
        CHAT_ANSWER if not routes else {"id": "resp_2", "status": "completed", "output": []}
    ).encode()
    response = await api.post(RESPONSES, {"input": [{"role": "user", "content": "hi"}, *references, result]})
    assert response.status_code == 200
    asked = api.relay.deliveries[-1]
    if routes:
        assert json.loads(body_for(asked))["input"][1:3] == first["output"]
    else:
        [_, thought, _] = json.loads(asked.body.original)["messages"]
        assert (thought["reasoning_content"], thought["tool_calls"][0]["id"]) == ("hm", "c1")
    assert first["output"][0] in json.loads(api.stored.get("", response.json()["id"], 0.0).items), (
        "stored as it is meant"
    )
    again = await api.post(RESPONSES, {"input": [*references, *references]})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "input")


async def test_a_thought_comes_back_by_its_seal_or_its_name(api: Api) -> None:
    said = {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    api.relay.answer = json.dumps({**CHAT_ANSWER, "choices": [choice]}).encode()
    asked = {"input": "hi", "include": ["reasoning.encrypted_content"]}
    [thought, _] = (await api.post(RESPONSES, asked)).json()["output"]
    [block, _] = (await api.post(MESSAGES, {"messages": [HI], "max_tokens": 5})).json()["content"]
    sealed = {key: thought[key] for key in ("type", "summary", "encrypted_content")}
    named = {"type": "reasoning", "id": thought["id"], "summary": []}
    for item in (sealed, named):
        await api.post(RESPONSES, {"input": [HI, item, {"role": "assistant", "content": "ok"}, HI]})
        assert prompted(api)[1] == said
    for kept in (block, {**block, "thinking": ""}, {"type": "redacted_thinking", "data": block["signature"]}):
        turn = {"role": "assistant", "content": [kept, {"type": "text", "text": "ok"}]}
        await api.post(MESSAGES, {"messages": [HI, turn, HI], "max_tokens": 5})
        assert prompted(api)[1] == said
    others = {**sealed, "encrypted_content": SealedThoughts(b"secret").seal("other", "hm")}
    await api.post(RESPONSES, {"input": [HI, others, {"role": "assistant", "content": "ok"}, HI]})
    assert prompted(api)[1] == {"role": "assistant", "content": "ok"}


def prompted(api: Api) -> list[dict[str, Any]]:
    """The messages that the engine got last."""
    messages: list[dict[str, Any]] = json.loads(api.relay.deliveries[-1].body.original)["messages"]
    return messages


async def test_a_budget_for_thoughts_goes_to_engines_that_have_one(api: Api) -> None:
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    asked = {"messages": [HI], "max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 20}}
    answer = await api.post(MESSAGES, asked)
    assert answer.headers["plait-ignored"] == "thinking.budget_tokens"
    assert "thinking_token_budget" not in api.relay.deliveries[-1].body.original.decode()
    api.router.recognised("a", "vllm")
    assert "plait-ignored" not in (await api.post(MESSAGES, asked)).headers
    assert json.loads(api.relay.deliveries[-1].body.original)["thinking_token_budget"] == 20


async def test_an_answer_says_what_was_left_out(api: Api) -> None:
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    tools = [TOOL, {"type": "web_search"}, {"type": "b\r\nx-a: \u00e4"}]
    response = await api.post(RESPONSES, {"input": "hi", "tools": tools})
    assert response.headers["plait-ignored"] == "tools[1]:web_search, tools[2]:b??x-a:??"
    assert "plait-ignored" not in (await api.post(RESPONSES, {"input": "hi", "tools": [TOOL]})).headers


async def test_a_context_overflow_has_the_words_of_the_api(api: Api) -> None:
    long = "hello " * 2_000
    refused = await api.post(MESSAGES, {"messages": [{"role": "user", "content": long}], "max_tokens": 5})
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 1000 maximum", refused.json()["error"]["message"])
    assert (await api.post(RESPONSES, {"input": long})).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("routes", [frozenset(ROUTES), frozenset({CHAT_PATH})], ids=["forwarded", "translated"])
async def test_an_answer_says_that_a_gateway_without_room_stores_no_response(
    api: Api, monkeypatch: pytest.MonkeyPatch, routes: frozenset[str]
) -> None:
    monkeypatch.setattr(api.stored, "_max_bytes", 0)
    api.router.health.answered("a", {"m": 1_000}, routes=routes)
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    response = await api.post("/v1/responses", {"model": "m", "input": "hi", "store": True})
    (asked,) = api.relay.deliveries
    if len(routes) == 1:
        assert response.json()["store"] is False
    else:
        assert json.loads(asked.body.original)["store"] is False
