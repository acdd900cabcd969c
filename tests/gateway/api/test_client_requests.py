"""What released clients send, up to the relay: `tests/corpus/clients` has the requests, recorded by `e2e/clients`."""

from __future__ import annotations

import json

import pytest

from plait.backends.translation.translation import COUNT_PATH
from plait.gateway.calls.routes import CHAT_PATH, KINDS
from plait.gateway.timer import loop_time_s
from tests.call_routes import ROUTES, TRANSLATED
from tests.client_requests import Sent, odd, recorded
from tests.gateway.api.fake_relay import CHAT_ANSWER, Api

CONTEXT_TOKENS = 100_000

REQUESTS = [
    (f"{client}-{number}-{sent['feature'].replace(' ', '-')}", sent) for number, (client, sent) in enumerate(recorded())
]
EACH = [pytest.param(sent, id=name) for name, sent in REQUESTS]
OF_OTHER_APIS = [pytest.param(sent, id=name) for name, sent in REQUESTS if sent["path"] in TRANSLATED]


def body_of(sent: Sent, api: Api) -> Sent:
    """The body for the model m; the response that it continues is stored."""
    body = {**sent["body"], "model": "m"}
    if previous := body.get("previous_response_id"):
        answer = b'{"id": "resp_0", "output": []}'
        items = b'[{"role": "user", "content": "hi"}]'
        api.stored.put("", previous, previous=None, items=items, answer=answer, now_s=loop_time_s())
    return body


def test_every_client_is_in_the_corpus() -> None:
    assert len({client for client, _ in recorded()}) >= 12
    assert {sent["path"] for _, sent in recorded()} >= {*KINDS, "/v1/responses", "/v1/messages", "/v1/embeddings"}


@pytest.mark.parametrize("sent", EACH)
async def test_a_request_is_relayed_to_engines_that_have_its_route(api: Api, sent: Sent) -> None:
    api.router.health.answered("a", {"m": CONTEXT_TOKENS}, routes=frozenset(ROUTES))
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    response = await api.post(sent["path"], body_of(sent, api), **sent["headers"])
    assert response.status_code == 200, response.text
    (asked,) = api.relay.deliveries
    assert asked.call.model == "m"
    assert asked.call.streamed == bool(sent["body"].get("stream"))


@pytest.mark.parametrize("sent", OF_OTHER_APIS)
async def test_a_request_is_translated_for_engines_that_have_chats_only(api: Api, sent: Sent) -> None:
    api.router.health.answered("a", {"m": CONTEXT_TOKENS}, routes=frozenset({CHAT_PATH}))
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    response = await api.post(sent["path"], body_of(sent, api), **sent["headers"])
    assert response.status_code == 200, response.text
    assert [asked.path for asked in api.relay.deliveries] == ([] if sent["path"] == COUNT_PATH else [CHAT_PATH])


@pytest.mark.parametrize("routes", [frozenset(ROUTES), frozenset({CHAT_PATH})], ids=["forwarded", "translated"])
async def test_an_odd_value_anywhere_is_taken_or_refused(api: Api, routes: frozenset[str]) -> None:
    """A failure is an exception of another kind than `PlaitError`, which nothing here catches."""
    api.router.health.answered("a", {"m": CONTEXT_TOKENS}, routes=routes)
    api.relay.answer = json.dumps(CHAT_ANSWER).encode()
    places: set[tuple[str, ...]] = set()
    bodies = [(sent["path"], body) for _, sent in REQUESTS for body in odd(sent, places)]
    assert len(bodies) > 1_000
    for path, body in bodies:
        response = await api.post(path, {**body, "model": "m"})
        assert response.status_code < 500, (path, body, response.text)
