"""Answers with other bytes than the engine's: what streams that have waited tell, and what a response continues."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.backends.protocol.api_errors import MESSAGE_ERRORS
from plait.backends.translation.translation import TRANSLATIONS
from plait.gateway.answers.completions import COMPLETION
from plait.gateway.asgi import AsgiSink
from plait.gateway.calls.commented_sink import CommentedSink
from plait.gateway.guests.responses.responses_api import ContinuedAnswer
from plait.gateway.guests.translation.rewritten_answer import TranslatedAnswer
from tests.call_routes import ROUTES
from tests.gateway.calls.scripted_engines import DONE, FINISH, LOST, Client, Exchange, FakeHttp, gateway

STREAM = [(b"content-type", b"text/event-stream")]
CHUNK = b'data: {"model": "m", "choices": [{"index": 0, "delta": {"content": "first"}}]}\n\n'


@pytest.mark.parametrize(
    ("path", "signs", "first"),
    [
        ("/v1/responses", ["response.created", "response.in_progress", "keepalive"], "response.output_item.added"),
        ("/v1/messages", ["ping", "ping"], "message_start"),
    ],
)
async def test_signs_of_life_come_in_the_clients_way_before_the_first_event(
    path: str, signs: list[str], first: str
) -> None:
    sent = list[bytes]()

    async def to_client(message: Any) -> None:
        sent.append(message.get("body", b""))

    translated = TranslatedAnswer(AsgiSink(to_client), TRANSLATIONS[path].answer({}), ROUTES[path].form.errors)
    held = CommentedSink(translated, COMPLETION, "r1")
    held.tell("waiting position=1 expected_s=4")
    held.start(200, [*STREAM, (b"plait-engine", b"a")])
    held.write(CHUNK)
    await held.flush()
    lines = b"".join(sent).decode().splitlines()
    assert [line for line in lines if line.startswith(":")] == [": waiting position=1 expected_s=4", ": plait-engine=a"]
    events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert events[: len(signs) + 1] == [*signs, first]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_each_response_object_of_a_stream_tells_what_it_continues(end: bytes) -> None:
    delta = rb'{"type":"response.output_text.delta","delta":"a \"response\": {}"}'
    other = [b": waiting", b"event: response.output_text.delta\ndata: " + delta, b'data: {"message":"no \'response\'"}']
    created = b'event: response.created\ndata: {"response":{"id":"r2","previous_response_id":%s}}'
    completed = b'event: response.completed\ndata: {"response":{"id":"r2"%s}}'
    sent = end.join([*other, created % b"null", completed % b"", b""])
    wanted = end.join([*other, created % b'"r1"', completed % b',"previous_response_id":"r1"', b""])
    assert ContinuedAnswer(AsgiSink(_nobody), "r1").events(sent) == wanted


@pytest.mark.parametrize("has_waited", [False, True])
async def test_a_message_begins_with_the_gateways_counts(has_waited: bool) -> None:
    sent = list[bytes]()

    async def to_client(message: Any) -> None:
        sent.append(message.get("body", b""))

    translated = TranslatedAnswer(AsgiSink(to_client), TRANSLATIONS["/v1/messages"].answer({}), MESSAGE_ERRORS)
    translated.expect_prompt(10)
    held = CommentedSink(translated, COMPLETION, "r1")
    if has_waited:
        held.tell("waiting")
    held.start(200, [*STREAM, (b"plait-cached-tokens", b"4")])
    held.write(CHUNK)
    await held.flush()
    [start] = [line for line in b"".join(sent).split(b"\n") if line.startswith(b'data: {"type":"message_start"')]
    usage = json.loads(start.removeprefix(b"data: "))["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (6, 4)


@pytest.mark.parametrize(("counted", "shown"), [(0, 8961), (12_400, 12_400), (50_000, 40_959)])
async def test_the_gateways_count_replaces_a_bound(counted: int, shown: int) -> None:
    """vLLM 0.25 stops counting where there is no room, so Claude Code would ask for a thousand less each time."""
    said = (
        "This model's maximum context length is 40960 tokens. However, you requested 32000 output tokens and your "
        "prompt contains at least 8961 input tokens, for a total of at least 40961 tokens."
    )
    translated = TranslatedAnswer(AsgiSink(_nobody), TRANSLATIONS["/v1/messages"].answer({}), MESSAGE_ERRORS)
    translated.expect_prompt(counted)
    told = json.loads(translated.error(400, json.dumps({"error": {"message": said, "code": 400}}).encode()))
    assert told["error"]["message"].endswith(f"exceed context limit: {shown} + 32000 > 40960")


BAD = b'data: {"choices": [{"te\n\n'


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    "pieces",
    [[CHUNK, BAD, LOST], [CHUNK, BAD, FINISH, DONE], [CHUNK + BAD + FINISH + DONE], [CHUNK, BAD + FINISH + DONE]],
    ids=["lost", "piece by piece", "in one read", "with the end"],
)
async def test_a_stream_that_cannot_be_translated_has_failed(path: str, pieces: list[bytes]) -> None:
    client = Client()
    translated = TranslatedAnswer(AsgiSink(client.send), TRANSLATIONS[path].answer({}), ROUTES[path].form.errors)
    async with gateway(FakeHttp(Exchange(pieces=pieces))) as made:
        await made.relay.deliver(made.asked(), translated)
        assert (made.ending.outcome, made.ending.code) == ("failed", "engine_garbled")
        assert made.outcomes() == {("a", "failed"): 1}
    names = [line.removeprefix(b"event: ") for line in client.body.split(b"\n") if line.startswith(b"event: ")]
    assert (client.ended, names[-1], names.count(b"error")) == (True, b"error", 1)
    assert b"first" in client.body


async def _nobody(_message: Any) -> None:
    raise AssertionError
