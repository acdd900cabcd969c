"""Answers made of streams for clients that asked for none: what goes on to the client, and what is held meanwhile."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from plait.backends.errors import EngineBrokenError, EngineGarbledError, LimitError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, parse_request
from plait.gateway.asgi import MessageSink
from plait.gateway.calls.open_answers import OpenAnswer
from plait.gateway.calls.outgoing import FIELDS, OutgoingBody
from plait.gateway.chaining import unstreamed_answer
from plait.gateway.chaining.unstreamed_answer import UnstreamedAnswer, as_stream
from plait.policy.types import Call, Placement, PlacementReason

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"plait-engine", b"e1"),
]
STREAM = {"type": "http.response.start", "status": 200, "headers": HEADERS}
DONE = b"data: [DONE]\n\n"
CHAT = b'{ "model":"m","vendor": {"x":[1 , 2.50]}, "messages":[{"role":"user","content":"\\u00e9"}] %s}'
CALL = Call("c", "m", 100, 64, ())
PLACEMENT = Placement("e", PlacementReason.EXPLOIT, cached_tokens=64, missed_tokens=36)


class Ledger:
    """Where the bytes count, up to `limit`."""

    def __init__(self, limit: int = 10**9) -> None:
        self.buffered_bytes = 0
        self.most_bytes = 0
        self._limit = limit

    def hold(self, size_bytes: int) -> None:
        if self.buffered_bytes + size_bytes > self._limit:
            raise LimitError("too much")
        self.buffered_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.buffered_bytes)

    def free(self, size_bytes: int) -> None:
        self.buffered_bytes -= size_bytes


class Received(MessageSink):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Any] = []

    def put(self, message: Any) -> None:
        self.messages.append(message)


class Client:
    """A client, what it was sent, and the answer on its way to it."""

    def __init__(self, limit: int = 10**9) -> None:
        received = Received()
        self.messages = received.messages
        self.ledger = Ledger(limit)
        self.answer = UnstreamedAnswer(received, OpenAnswer(self.ledger))

    async def send(self, *events: bytes, ends: bool = True) -> None:
        """Events of a stream, one a message, after its head."""
        self.answer.put(STREAM)
        for event in events:
            self.answer.put({"type": "http.response.body", "body": event, "more_body": True})
        if ends:
            self.answer.put({"type": "http.response.body", "body": b""})

    @property
    def got(self) -> tuple[int, Any]:
        head, body = self.messages
        assert head["headers"].count((b"content-length", b"%d" % len(body["body"]))) == 1
        return head["status"], json.loads(body["body"])


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(piece: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish_reason}]})


async def test_a_stream_becomes_one_answer() -> None:
    client = Client()
    await client.send(text("one"), text(" two", "stop"), DONE)
    assert client.got == (200, {"choices": [{"index": 0, "text": "one two", "finish_reason": "stop"}]})
    headers = client.messages[0]["headers"]
    assert (b"content-type", b"application/json") in headers
    assert (b"plait-engine", b"e1") in headers
    assert {name for name, _ in headers} == {b"content-type", b"content-length", b"plait-engine"}
    assert client.ledger.buffered_bytes == 0
    assert client.ledger.most_bytes >= len("one two")


@pytest.mark.parametrize(("status", "media"), [(200, b"application/json"), (400, b"application/json")])
async def test_what_is_no_stream_goes_on_as_it_is(status: int, media: bytes) -> None:
    client = Client()
    sent: list[Any] = [
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", media)]},
        {"type": "http.response.body", "body": b"{}"},
    ]
    for message in sent:
        client.answer.put(message)
    assert client.messages == sent


async def test_a_stream_that_breaks_off_is_not_seen_and_the_next_one_is_whole() -> None:
    client = Client()
    await client.send(text("wrong"), ends=False)
    lost = EngineBrokenError("engine e1 was lost")
    client.answer.put({"type": "http.response.body", "body": b"data: %b\n\n" % lost.body()})
    assert (client.messages, client.ledger.buffered_bytes) == ([], 0)
    await client.send(text("wrong again"), ends=False)
    await client.send(text("right", "stop"), DONE)
    assert client.got[1]["choices"][0]["text"] == "right"
    assert client.ledger.buffered_bytes == 0


async def test_an_error_event_that_is_the_callers_fault_is_a_refusal() -> None:
    client, error = Client(), {"message": "too long", "type": "BadRequestError", "code": 413}
    await client.send(text("one"), event({"error": error}), DONE)
    assert client.got == (413, {"error": error})


async def test_an_engine_that_sends_no_completion_is_at_fault() -> None:
    client = Client()
    with pytest.raises(EngineGarbledError, match="engine e1 sent an event that is no part of a completion"):
        await client.send(text("one"), b"data: {\n\n")
    client.answer.put({"type": "http.response.body", "body": b"data: {}\n\n"})
    assert (client.messages, client.ledger.buffered_bytes) == ([], 0)


async def test_an_answer_beyond_all_bounds_is_the_engines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unstreamed_answer, "MAX_ANSWER_BYTES", 3_000)
    client = Client()
    with pytest.raises(EngineGarbledError, match="over 3000 bytes"):
        await client.send(*[text("x" * 500)] * 10)
    assert (client.messages, client.ledger.buffered_bytes) == ([], 0)


async def test_an_answer_beyond_the_tenants_limit_is_given_up() -> None:
    client = Client(limit=3_000)
    with pytest.raises(LimitError):
        await client.send(*[text("x" * 500)] * 10)
    client.answer.drop()
    assert (client.messages, client.ledger.buffered_bytes) == ([], 0)


def test_a_request_becomes_a_stream_with_its_usage() -> None:
    body = CHAT % b',"stream":false,"stream_options":null,"best_of":null,"use_beam_search":false'
    fields = FIELDS.decode(body)
    request = as_stream(fields, parse_request(body, ChatRequest))
    streamed = msgspec.json.encode(fields)
    assert request is not None
    assert request == parse_request(streamed, ChatRequest)
    assert b'"vendor":{"x":[1 , 2.50]}' in streamed
    outgoing = OutgoingBody(streamed, request)
    sent = json.loads(outgoing.for_engine(None, CALL, PLACEMENT, 0.25))
    assert (outgoing.withholds_usage, sent["stream"]) == (False, True)
    assert sent["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("field", ['"best_of": 3', '"use_beam_search": true', '"prompt_logprobs": 0', '"audio": {}'])
def test_what_engines_do_not_stream_stays_whole(field: str) -> None:
    body = b'{"model": "m", "prompt": "one", %b}' % field.encode()
    fields = FIELDS.decode(body)
    assert as_stream(fields, parse_request(body, CompletionRequest)) is None
    assert fields == FIELDS.decode(body)
