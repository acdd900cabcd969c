"""`/v1/responses/input_tokens`, and what of OpenAI's Responses there is not."""

from __future__ import annotations

import json

import pytest

from tests.gateway.api.fake_relay import CHAT_ANSWER, Api, body_for
from tests.gateway.api.served_gateway import Reply, serving

RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
TEXT = "hello " * 20


async def count(api: Api, **fields: object) -> int:
    response = await api.post(INPUT_TOKENS, fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "response.input_tokens"
    tokens: int = body["input_tokens"]
    return tokens


async def test_the_tokens_are_those_of_the_response(api: Api) -> None:
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    counted = await count(api, input=TEXT)
    assert not api.relay.deliveries
    await api.post(RESPONSES, {"input": TEXT})
    assert counted == api.relay.deliveries[-1].call.prompt_tokens


async def test_what_it_continues_counts_and_nothing_is_stored(api: Api) -> None:
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    first = (await api.post(RESPONSES, {"input": TEXT})).json()["id"]
    stored = api.stored.size_bytes("")
    counted = await count(api, input="and then?", previous_response_id=first)
    assert counted > await count(api, input="and then?") + 20
    assert api.stored.size_bytes("") == stored
    unknown = await api.post(INPUT_TOKENS, {"input": "x", "previous_response_id": "resp_0"})
    assert unknown.status_code == 400


async def test_an_engine_that_has_the_route_is_asked(api: Api) -> None:
    api.router.health.answered("a", {"m": 1_000}, routes=frozenset({INPUT_TOKENS}))
    asked = await api.asked(INPUT_TOKENS, {"input": TEXT})
    assert (asked.route, asked.call.prompt_tokens) == (INPUT_TOKENS, 0), "it computes nothing"
    assert json.loads(body_for(asked)) == {"model": "m", "input": TEXT}


@pytest.mark.parametrize("path", [RESPONSES, INPUT_TOKENS])
@pytest.mark.parametrize("routes", [set[str](), {RESPONSES, INPUT_TOKENS}], ids=["translated", "forwarded"])
async def test_a_conversation_is_refused_with_what_there_is(api: Api, path: str, routes: set[str]) -> None:
    api.router.health.answered("a", {"m": 1_000}, routes=frozenset(routes))
    error = await api.post(path, {"input": "hi", "conversation": "conv_1"})
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "conversation"
    assert "previous_response_id" in error.json()["error"]["message"]


def handshake(path: str, key: str = "one") -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: x", "connection: Upgrade", "upgrade: websocket"]
    return "\r\n".join([*lines, "sec-websocket-key: x", f"authorization: Bearer {key}", "", ""]).encode()


async def test_a_websocket_is_told_to_use_http() -> None:
    async with serving() as made:
        there, elsewhere, unknown = [
            Reply.of(await made.head(handshake(path, key)))
            for path, key in ((RESPONSES, "one"), ("/v1/embeddings", "one"), (RESPONSES, "two"))
        ]
    assert (there.status, there.headers["upgrade"]) == (426, "HTTP/1.1")
    assert (elsewhere.status, unknown.status) == (405, 401)
