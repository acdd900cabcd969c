"""Routes beside completions: what is forwarded, what is translated, and in which shape errors come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.policy.types import Placement, PlacementReason
from tests.gateway.api.fake_relay import CHAT_ANSWER, Api

RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
ASK: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hello " * 200},
    MESSAGES: {"messages": [{"role": "user", "content": "hello " * 200}], "max_tokens": 5},
}
PLACEMENT = Placement("a", PlacementReason.EXPLORE, 0, 0)


def has(api: Api, *routes: str) -> None:
    api.router.health.answered("a", {"m": 1_000}, routes=frozenset(routes))


@pytest.mark.parametrize("path", ASK)
async def test_engines_that_have_the_route_get_the_request_as_it_came(api: Api, path: str) -> None:
    has(api, path)
    delivery = await api.delivery(path, ASK[path])
    assert (delivery.path, delivery.route) == (path, path)
    assert delivery.call.prompt_tokens > 200
    assert len(delivery.call.block_hashes) == delivery.call.prompt_tokens // 64, "placed by its prefix"
    sent = delivery.body.for_engine("vllm", delivery.call, PLACEMENT, 0.0)
    assert sent == json.dumps({"model": "m", **ASK[path]}).encode()


@pytest.mark.parametrize("path", ASK)
async def test_the_prompt_is_that_of_the_chat_that_it_stands_for(api: Api, path: str) -> None:
    has(api, path)
    forwarded = await api.delivery(path, ASK[path])
    chat = await api.delivery("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 200}]})
    assert forwarded.call.block_hashes == chat.call.block_hashes


@pytest.mark.parametrize("path", ASK)
@pytest.mark.parametrize(
    ("routes", "more"),
    [([], {}), (None, {}), ("all", {"plait_priority": "3"})],
    ids=["not there", "not known", "annotated"],
)
async def test_else_it_is_translated(api: Api, path: str, routes: Any, more: dict[str, str]) -> None:
    if routes is not None:
        has(api, *([path] if routes == "all" else []))
    response = await api.post(path, ASK[path], **more)
    (delivery,) = api.relay.deliveries
    assert (delivery.path, delivery.route) == ("/v1/chat/completions", None)
    assert json.loads(delivery.body.original)["messages"][0]["content"] == "hello " * 200
    assert response.status_code == 502, "the fake relay's answer is no completion"
    shape = response.json()
    assert shape["error"]["message"]
    assert ("type" in shape) == (path == MESSAGES)


async def test_vectors_are_placed_by_load_on_an_engine_that_has_the_route(api: Api) -> None:
    has(api, EMBEDDINGS)
    delivery = await api.delivery(EMBEDDINGS, {"input": ["x" * 4_000], "plait": {"session": "s"}})
    assert (delivery.route, list(delivery.call.block_hashes), delivery.session) == (EMBEDDINGS, [], "s")
    assert delivery.call.prompt_tokens > 900
    assert b"plait" not in delivery.body.for_engine(None, delivery.call, PLACEMENT, 0.0)
    assert (await api.delivery("/tokenize", {"prompt": "x" * 4_000})).call.prompt_tokens == 0


async def test_what_a_route_cannot_heed_is_refused(api: Api) -> None:
    response = await api.post(EMBEDDINGS, {"input": "x"}, plait_slo_ttft_ms="5")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "plait")


async def test_tokens_are_counted_here_where_engines_do_not(api: Api) -> None:
    has(api, MESSAGES)
    response = await api.post(f"{MESSAGES}/count_tokens", {"messages": ASK[MESSAGES]["messages"]})
    chat = await api.delivery("/v1/chat/completions", {"messages": ASK[MESSAGES]["messages"]})
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


async def test_a_response_in_the_background_is_refused(api: Api) -> None:
    has(api, RESPONSES)
    response = await api.post(RESPONSES, {"input": "x", "background": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "background")
