"""Calls that are chained to others, over the relay: what is read on the way, where they go, how they ended."""

from __future__ import annotations

import copy
import gzip
import json
from codecs import BOM_UTF8
from typing import Any

import msgspec
import pytest

from plait.backends.errors import EngineError, EngineTimeoutError
from plait.gateway.answers.completion_text import TextTap
from plait.gateway.answers.other_answers import OBJECT
from plait.gateway.asgi import AsgiSink, Headers
from plait.gateway.fleet.health import HealthState
from plait.gateway.guests.translation.typed_answers import MESSAGE
from plait.policy.types import Call
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    HASHES,
    JSON,
    LOST,
    USAGE_EVENT,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
)

CHOICE = b'data: {"choices":[{"text":"one"}]}\n\n'


def error_event(code: int | str) -> bytes:
    return b"data: " + msgspec.json.encode({"error": {"message": "dead", "code": code}}) + b"\n\n"


def refused(status: int) -> Exchange:
    return Exchange(status, JSON, [b'{"error":{"message":"no"}}'])


@pytest.mark.parametrize(
    ("exchange", "texts", "problem"),
    [
        (Exchange(pieces=[CHOICE[:9], CHOICE[9:] + FINISH, USAGE_EVENT, DONE]), ["one"], None),
        (Exchange(headers=JSON, pieces=[b'{"choices":[{"text":"one","finish_reason":"stop"}]}']), ["one"], None),
        (Exchange(headers=JSON, pieces=[WHOLE]), [], "its answer has no text"),
        (Exchange(pieces=[CHOICE, error_event(400), DONE]), ["one"], "dead"),
        (refused(400), [], "refused with status 400: no"),
    ],
    ids=["streamed", "whole", "without text", "an error in the stream", "refused"],
)
async def test_the_text_is_read_on_its_way_and_the_outcome_told(
    exchange: Exchange, texts: list[str], problem: str | None
) -> None:
    read: list[str] = []
    client = Client()
    async with gateway(FakeHttp(exchange)) as made:
        ending = await made.relay.run(made.asked(text=TextTap(read.append), session="s1"), AsgiSink(client.send))
        assert (ending.engine_id, ending.problem) == ("a", problem)
        assert (read, client.headers[b"plait-session"], client.ended) == (texts, b"s1", True)


@pytest.mark.parametrize(
    ("answer", "is_told", "message"),
    [
        (EngineTimeoutError("silent"), False, "silent"),
        (Exchange(pieces=[CHOICE, LOST]), True, "engine lost"),
        (Exchange(pieces=[CHOICE, error_event(500), DONE]), False, "engine a: dead"),
        (refused(503), False, "engine a answered with status 503: no"),
    ],
    ids=["silent", "lost in a stream", "dead in a stream", "refused"],
)
async def test_what_is_an_engines_fault_is_told_apart(
    answer: Exchange | EngineError, is_told: bool, message: str
) -> None:
    client = Client()
    async with gateway(FakeHttp(*(copy.deepcopy(answer) for _ in range(3)))) as made:
        ending = await made.relay.run(made.asked(text=TextTap(lambda _: None)), AsgiSink(client.send))
        assert isinstance(ending.problem, EngineError)
        assert (ending.engine_id, ending.problem.message, ending.is_told) == ("a", message, is_told)
        assert (client.sent != []) == is_told


async def goes(made: Gateway, *avoids: str, continues_on: str | None = None, **more: Any) -> str:
    """Where a call went."""
    asked = made.asked(avoids=frozenset(avoids), continues_on=continues_on, **more)
    return (await made.relay.run(asked, AsgiSink(Client().send))).engine_id


async def test_a_continuation_goes_where_its_beginning_ran_while_that_is_up() -> None:
    engines = [FakeHttp(*(Exchange(headers=JSON, pieces=[WHOLE]) for _ in range(4))) for _ in range(2)]
    async with gateway(*engines) as made:
        went = [await goes(made, continues_on="b") for _ in range(3)]
        assert went == ["b", "b", "b"], "though turns are taken"
        made.router.health.unreachable("b")
        assert await goes(made, continues_on="b") == "a"
        assert await goes(made, continues_on="gone") == "a"


@pytest.mark.parametrize("turn_of", ["", "user-1"])
async def test_a_line_goes_to_the_engine_that_it_was_given(turn_of: str) -> None:
    engines = [FakeHttp(*(Exchange(headers=JSON, pieces=[WHOLE]) for _ in range(4))) for _ in range(2)]
    async with gateway(*engines) as made:
        went = [await goes(made, prefer="b", is_line=True, turn_of=turn_of) for _ in range(3)]
        assert went == ["b", "b", "b"], "though turns are taken"


async def test_a_call_avoids_the_engines_that_have_failed_it_while_there_are_others() -> None:
    engines = [FakeHttp(*(Exchange(headers=JSON, pieces=[WHOLE]) for _ in range(4))) for _ in range(3)]
    async with gateway(*engines) as made:
        assert {await goes(made, "a", "b") for _ in range(3)} == {"c"}
        assert await goes(made, "b", continues_on="b") != "b"
        made.router.health.unreachable("c")
        made.router.health.unreachable("b")
        assert await goes(made, "a", "b") == "a", "there is no other"


async def test_what_is_asked_can_be_delivered_again_without_the_failures_of_before() -> None:
    async with gateway(
        FakeHttp(LOST, Exchange(headers=JSON, pieces=[WHOLE]), Exchange(headers=JSON, pieces=[WHOLE]))
    ) as made:
        asked = made.asked()
        for failed_on in (["a"], []):
            ending = await made.relay.run(asked, AsgiSink(Client().send))
            failures = made.seen.ended_calls[-1].failures
            assert ([engine_id for engine_id, _ in failures], ending.problem) == (failed_on, None)


async def test_what_came_back_of_a_failed_attempt_is_not_the_calls() -> None:
    broken = Exchange(pieces=[FINISH + USAGE_EVENT + error_event(500) + b"\n\n"])
    async with gateway(FakeHttp(broken, EngineTimeoutError("silent"))) as made:
        await made.relay.run(made.asked(), AsgiSink(Client().send))
        (delivery,) = made.seen.ended_calls
        assert len(delivery.failures) == 2
        assert (delivery.attempt, delivery.usage) == (None, None)


HALF = b'{"choices":[{"text":"a \\ud83d","finish_reason":"stop"}]}'
REFUSED_HALF = b'{"error":{"message":"no \\udc00"}}'


@pytest.mark.parametrize(
    "exchange",
    [
        Exchange(headers=JSON, pieces=[HALF]),
        Exchange(headers=JSON, pieces=[HALF[:30], HALF[30:]]),
        Exchange(pieces=[b"data: \n\n", b"data: " + HALF + b"\n\n", DONE]),
        Exchange(400, JSON, [REFUSED_HALF]),
    ],
    ids=["whole", "in pieces", "streamed", "refused"],
)
async def test_half_a_surrogate_pair_in_an_answer_is_a_replacement(exchange: Exchange) -> None:
    client, texts = Client(), list[str]()
    async with gateway(FakeHttp(exchange)) as made:
        await made.relay.run(made.asked(text=TextTap(texts.append)), AsgiSink(client.send))
    assert client.body.count(b"\\ufffd") == 1
    assert not any(half in client.body for half in (b"\\ud", b"data: \n"))
    assert texts == (["a \ufffd"] if client.status == 200 else [])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"object": "error", "message": "too large", "type": "BadRequestError", "code": 400}, 400),
        ({"error": {"message": "too large", "type": "invalid_request_error", "code": None}}, 400),
        ({"error": {"message": "too large", "code": 422}}, 422),
        ({"object": "error", "message": "too large", "code": 40302}, 400),
    ],
)
async def test_an_error_of_status_200_goes_out_at_once_with_its_own_status(error: Any, status: int) -> None:
    engine = FakeHttp(Exchange(headers=JSON, pieces=[json.dumps(error).encode()]))
    async with gateway(engine) as made:
        await made.deliver(client := Client())
        assert (client.status, json.loads(client.body)["error"]["message"]) == (status, "too large")
        assert made.outcomes() == {("a", "refused"): 1}
        assert made.router.engines["a"].health.state is HealthState.UP


async def test_a_call_gets_the_form_that_it_asked_for() -> None:
    events = [b'data: {"object":"text_completion","choices":[{"index":0,"text":"x"}]}\n\n', FINISH, DONE]
    whole = b'{"object":"text_completion","choices":[{"index":0,"text":"x","finish_reason":"stop"}]}'
    async with gateway(FakeHttp(Exchange(pieces=events), Exchange(headers=JSON, pieces=[whole]))) as made:
        await made.deliver_whole(client := Client())
        assert client.headers[b"content-type"] == b"application/json"
        assert json.loads(client.body) == json.loads(whole)
        await made.deliver_call(client := Client(), Call("r1", "m", 257, 64, HASHES))
        assert client.headers[b"content-type"].startswith(b"text/event-stream")
        assert client.body.endswith(DONE)
        assert client.body.count(b'"text":"x"') == 1


async def test_a_whole_answer_may_begin_with_a_byte_order_mark() -> None:
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[BOM_UTF8 + WHOLE]))) as made:
        await made.deliver(client := Client())
        assert client.body == WHOLE


async def test_an_encoding_that_was_not_asked_for_is_named() -> None:
    headers = [*JSON, (b"content-encoding", b"gzip")]
    async with gateway(FakeHttp(Exchange(headers=headers, pieces=[gzip.compress(WHOLE)]), LOST, LOST)) as made:
        with pytest.raises(EngineError) as caught:
            await made.deliver_whole(Client())
        assert caught.value.message == "engine a sent an unasked encoding, 'gzip'"


NO_STREAM = Call("r1", "m", 257, 64, HASHES, streamed=False)
PAGE = [(b"content-type", b"text/html; charset=utf-8")]
LIST = b'{"data":[],"usage":{"prompt_tokens":5,"total_tokens":5}}'


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (PAGE, b"<html>10.0.0.1 is ill</html>"),
        (JSON, b"<html></html>"),
        (JSON, LIST[:9]),
        (JSON, b""),
        (JSON, b'"\xff"'),
    ],
    ids=["page", "page as JSON", "cut", "empty", "not UTF-8"],
)
async def test_a_page_in_place_of_vectors_goes_to_another_engine(headers: Headers, body: bytes) -> None:
    wrong, right = FakeHttp(Exchange(headers=headers, pieces=[body])), FakeHttp(Exchange(headers=JSON, pieces=[LIST]))
    async with gateway(wrong, right) as made:
        await made.relay.deliver(made.asked(form=OBJECT, call=NO_STREAM), AsgiSink((client := Client()).send))
        assert (client.status, client.body) == (200, LIST)
        assert [error.cause for _, error in made.seen.ended_calls[-1].failures] == ["garbled"]


@pytest.mark.parametrize("kind", [[(b"content-type", b"application/octet-stream")], []], ids=["named", "not named"])
async def test_vectors_as_bytes_pass(kind: Headers) -> None:
    async with gateway(FakeHttp(Exchange(headers=kind, pieces=[b"\x00\xff<"]))) as made:
        await made.relay.deliver(made.asked(form=OBJECT, call=NO_STREAM), AsgiSink((client := Client()).send))
        assert (client.status, client.body) == (200, b"\x00\xff<")


@pytest.mark.parametrize(
    ("status", "answer", "kind", "said"),
    [
        (400, {"error": {"message": "no", "type": "BadRequestError", "code": 400}}, "invalid_request_error", "no"),
        (400, {"type": "error", "error": {"type": "x", "message": "no"}}, "invalid_request_error", "no"),
        (413, {"object": "error", "message": "no"}, "request_too_large", "no"),
        (501, {"error": {"message": "no", "type": "NotImplementedError"}}, "api_error", "no"),
        (501, {"detail": "no"}, "api_error", "no"),
        (
            400,
            {"error": {"message": "This model's maximum context length is 9 tokens. You sent 11 input tokens."}},
            "invalid_request_error",
            "prompt is too long: 11 tokens > 9 maximum",
        ),
    ],
)
async def test_an_engines_refusal_has_the_form_of_the_clients_api(
    status: int, answer: Any, kind: str, said: str
) -> None:
    async with gateway(FakeHttp(Exchange(status, JSON, [json.dumps(answer).encode()]))) as made:
        await made.relay.deliver(made.asked(form=MESSAGE), AsgiSink((client := Client()).send))
        assert client.status == status
        assert json.loads(client.body) == {"type": "error", "error": {"type": kind, "message": said}}


async def test_a_refusal_in_another_form_has_the_type_of_its_status() -> None:
    async with gateway(FakeHttp(Exchange(501, JSON, [b'{"detail": "no"}']))) as made:
        await made.deliver(client := Client())
        assert json.loads(client.body)["error"] == {
            "message": "no",
            "type": "server_error",
            "param": None,
            "code": None,
        }
