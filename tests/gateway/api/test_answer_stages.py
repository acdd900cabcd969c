"""Stages of an answer's way: however an engine's events come together, the client gets the same bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.api_errors import MESSAGE_ERRORS, RESPONSE_ERRORS
from plait.backends.translation.answer_translator import Identity, TurnTranslator
from plait.backends.translation.messages import MessageTurn
from plait.backends.translation.responses import ResponseTurn
from plait.gateway.answers.event_bytes import events_of
from plait.gateway.asgi import AsgiSink, ClientSink, ClientStage, Headers, Stage
from plait.gateway.calls.service_tier import Tier
from plait.gateway.guests.responses.responses_api import ContinuedAnswer, KeptResponse
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.guests.translation.rewritten_answer import TranslatedAnswer
from plait.gateway.guests.translation.translated_api import NamedAnswer
from plait.policy.types import Objective
from tests.backends.translation.test_interleaved_streams import answers
from tests.waiting import WITHIN_S

STREAM: Headers = [(b"content-type", b"text/event-stream")]
IDENTITY = Identity("key", 1_700_000_000)


def as_messages(to: ClientSink) -> Stage:
    return TranslatedAnswer(to, TurnTranslator(MessageTurn({}, IDENTITY)), MESSAGE_ERRORS)


def as_responses(to: ClientSink) -> Stage:
    return TranslatedAnswer(to, TurnTranslator(ResponseTurn({}, IDENTITY)), RESPONSE_ERRORS)


def as_stored_response(to: ClientSink) -> Stage:
    return as_responses(KeptResponse(ContinuedAnswer(to, "resp_1"), StoredResponses(10**6, 60.0), "t", "resp_1", []))


def with_tier(to: ClientSink) -> Stage:
    return Tier(to, Objective.LATENCY)


def with_name(to: ClientSink) -> Stage:
    return NamedAnswer(to, "r1")


WAYS = pytest.mark.parametrize("way", [as_messages, as_responses, as_stored_response, with_tier, with_name])


async def told(way: Callable[[ClientSink], Stage], groups: Sequence[bytes]) -> tuple[list[Any], bytes]:
    """The head and the body that the client of a stream gets."""
    sent: list[Any] = []

    async def to_client(message: Any) -> None:
        sent.append(message)

    stage = way(AsgiSink(to_client))
    stage.start(200, STREAM)
    for group in groups[:-1]:
        stage.write(group)
    stage.end(groups[-1])
    await stage.flush()
    assert (stage.is_drained, sent[-1].get("more_body", False)) == (True, False)
    return sent[0]["headers"], b"".join(message["body"] for message in sent[1:])


@WAYS
@given(answer=answers(), data=st.data())
def test_any_grouping_of_events_gives_the_same_bytes(
    way: Callable[[ClientSink], Stage], answer: tuple[bytes, list[bytes]], data: st.DataObject
) -> None:
    _, events = answer
    ends = sorted(data.draw(st.sets(st.integers(1, len(events)), max_size=4)) | {len(events)})
    groups = [b"".join(events[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    one_by_one = asyncio.run(told(way, events))
    assert asyncio.run(told(way, groups)) == one_by_one
    assert len(events_of(one_by_one[1])) >= 1


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


@pytest.mark.parametrize(
    ("instructions", "text"),
    [
        ("Be brief.", "Yes."),
        ("Explain response.completed", "Yes."),
        ("Be brief.", "The event response.completed ends it."),
    ],
)
async def test_a_response_is_stored_at_its_end_whatever_its_texts_mention(instructions: str, text: str) -> None:
    sent: list[Any] = []

    async def to_client(message: Any) -> None:
        sent.append(message)

    stored, ended = StoredResponses(10**6, 60.0), asyncio.get_running_loop().create_future()
    kept = KeptResponse(AsgiSink(to_client), stored, "t", None, [])
    stage = TranslatedAnswer(
        kept, TurnTranslator(ResponseTurn({"instructions": instructions}, IDENTITY)), RESPONSE_ERRORS
    )
    flushing = asyncio.create_task(stage.flush(ended))
    stage.start(200, STREAM)
    for delta, finish in (({"content": text}, None), ({}, "stop")):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        stage.write(b"data: " + msgspec.json.encode({"model": "m", "choices": [choice]}) + b"\n\n")
        await asyncio.sleep(0)
    stage.on_room = partial(_end, ended)
    stage.end(b"data: [DONE]\n\n")
    async with asyncio.timeout(WITHIN_S):
        await flushing
    assert events_of(sent[-1]["body"])[-1].startswith(b"event: response.completed")
    (response,) = (response for tenant in stored._tenants.values() for response in tenant.responses.values())
    assert msgspec.json.decode(response.answer)["status"] == "completed"


@pytest.mark.parametrize("way", [as_messages, as_responses, as_stored_response, with_name])
async def test_an_answer_that_comes_by_asgi_is_the_same(way: Callable[[ClientSink], ClientStage]) -> None:
    """Another application may answer in place of an engine: a gateway that owns the session."""
    said = {"role": "assistant", "content": "hi"}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    body = msgspec.json.encode({"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]})
    written: list[Any] = []

    async def to_client(message: Any) -> None:
        written.append(message)

    stage = way(AsgiSink(to_client))
    stage.whole(200, [(b"content-type", b"application/json")], body)
    await stage.flush()
    at_once = written[:]
    written.clear()
    stage = way(AsgiSink(to_client))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await stage.send({"type": "http.response.start", "status": 200, "headers": headers})
    await stage.send({"type": "http.response.body", "body": body[:9], "more_body": True})
    assert not written
    await stage.send({"type": "http.response.body", "body": body[9:]})
    assert written == at_once
