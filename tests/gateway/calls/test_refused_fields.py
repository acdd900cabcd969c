"""Fields that the gateway itself wrote and an engine refuses: the call goes there again without them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from plait.backends.protocol.openai import ChatRequest, parse_request
from plait.gateway.answers.refusals import EFFORTS, nearest_effort, refused_field
from plait.gateway.asgi import AsgiSink
from plait.gateway.calls.outgoing import OutgoingBody
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    JSON,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
)

NO_OPTIONS = b'{"error": {"message": "Unknown parameter: \'stream_options\'.", "param": "stream_options"}}'
NO_EFFORT = b"""{"object": "error", "message": "1 validation error: {'type': 'literal_error', 'loc': ('body',
 'reasoning_effort'), 'msg': \\"Input should be 'low', 'medium' or 'high'\\", 'input': '%b'}", "code": 400}"""


def refusal(body: bytes = NO_OPTIONS, status: int = 400) -> Exchange:
    return Exchange(status, JSON, [body])


def stream() -> Exchange:
    return Exchange(pieces=[FINISH, DONE])


def body(*, translated: bool = False, **fields: Any) -> OutgoingBody:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
    return OutgoingBody(raw, parse_request(raw, ChatRequest), is_translated=translated)


async def ask(made: Gateway, outgoing: OutgoingBody) -> Client:
    client = Client()
    asked = made.asked()
    call = asked.call._replace(streamed=bool(outgoing.request.stream))
    changed = type(asked)(call, "/v1/chat/completions", (), outgoing)
    await made.relay.deliver(changed, AsgiSink(client.send))
    return client


def got(engine: FakeHttp, name: str) -> list[Any]:
    return [json.loads(sent).get(name) for _, _, sent in engine.requests]


@pytest.mark.parametrize("status", [400, 422])
async def test_options_that_only_the_gateway_wants_are_left_out_from_then_on(status: int) -> None:
    engine = FakeHttp(refusal(status=status), stream(), stream())
    async with gateway(engine) as made:
        for _ in range(2):
            assert (await ask(made, body(stream=True))).body == FINISH + DONE
        assert got(engine, "stream_options") == [{"include_usage": True}, None, None]
        made.router.health.unreachable("a")
        assert made.router.engines["a"].refused_fields == {}, "a newer engine may take it"


async def test_a_clients_own_options_are_the_clients() -> None:
    engine = FakeHttp(refusal())
    async with gateway(engine) as made:
        assert (await ask(made, body(stream=True, stream_options={"include_usage": True}))).status == 400


@pytest.mark.parametrize(
    ("effort", "nearest"), [("xhigh", "high"), ("minimal", "low"), ("max", "high"), ("none", "low")]
)
async def test_a_translated_effort_becomes_the_nearest_word_of_the_engine(effort: str, nearest: str) -> None:
    engine = FakeHttp(refusal(NO_EFFORT % effort.encode()), Exchange(headers=JSON, pieces=[WHOLE]))
    async with gateway(engine) as made:
        client = await ask(made, body(translated=True, reasoning_effort=effort))
        assert (client.status, client.body) == (200, WHOLE)
        assert got(engine, "reasoning_effort") == [effort, nearest]
        engine.answers.append(Exchange(headers=JSON, pieces=[WHOLE]))
        await ask(made, body(reasoning_effort="xhigh"))
        assert got(engine, "reasoning_effort")[-1] == "xhigh", "a client's own word is the engine's to judge"


async def test_both_fields_may_be_refused_one_after_the_other() -> None:
    engine = FakeHttp(refusal(NO_EFFORT % b"max"), refusal(), stream())
    async with gateway(engine) as made:
        outgoing = body(translated=True, stream=True, stream_options={"include_usage": True}, reasoning_effort="max")
        assert (await ask(made, outgoing)).status == 200
        assert got(engine, "reasoning_effort") == ["max", "high", "high"]
        assert got(engine, "stream_options") == [{"include_usage": True}, {"include_usage": True}, None]


async def test_a_refusal_that_only_quotes_a_field_is_not_remembered() -> None:
    engine = FakeHttp(refusal(), refusal(b'{"error": {"message": "stream_options is not the reason"}}'), stream())
    async with gateway(engine) as made:
        client = await ask(made, body(stream=True))
        assert (client.status, b"not the reason" in client.body) == (400, True)
        await ask(made, body(stream=True))
        assert got(engine, "stream_options")[-1] == {"include_usage": True}


async def test_each_engine_is_asked_for_what_it_knows() -> None:
    engines = FakeHttp(refusal(), stream()), FakeHttp(stream(), stream())
    async with gateway(*engines) as made:
        await asyncio.gather(*[ask(made, body(stream=True)) for _ in range(2)])
        assert all(got(engines[1], "stream_options"))


@pytest.mark.parametrize("effort", [*EFFORTS, None, 3, "huge"])
def test_the_nearest_effort_is_one_of_the_words(effort: object) -> None:
    assert nearest_effort(effort, ()) is None
    nearest = nearest_effort(effort, ("low", "medium", "high"))
    assert nearest == (effort if effort in ("low", "medium", "high") else nearest)
    assert (nearest is None) == (effort not in EFFORTS)


def test_only_refusals_about_own_fields_count() -> None:
    own = body(stream=True).own_fields
    assert refused_field(400, NO_OPTIONS, own) == ("stream_options", [])
    assert refused_field(500, NO_OPTIONS, own) is None
    assert refused_field(400, NO_EFFORT, own) is None
    assert refused_field(400, NO_OPTIONS, body().own_fields) is None
