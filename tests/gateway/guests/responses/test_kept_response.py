"""Responses whose engine chooses what is no id: their clients get them, and no store hears of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
from starlette.types import Message

from plait.backends.errors import CallerError
from plait.gateway.asgi import AsgiSink
from plait.gateway.guests.responses.responses_api import KeptResponse
from plait.gateway.guests.responses.stored_responses import ResponsesCollector, StoredResponses
from plait.gateway.streams import Change, StreamKey
from tests.pieces import at_once

JSON, EVENTS = (b"content-type", b"application/json"), (b"content-type", b"text/event-stream")


class Written:
    """The log, in a list."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def check(self, *, is_whole: bool = False) -> None: ...

    def make(self, tenant: str, response_id: str) -> None: ...

    def append(self, changes: Sequence[Change]) -> None:
        self.names += [change.stream.name for change in changes]

    async def committed(self, stream: StreamKey) -> bool:
        assert stream.name in self.names, "nobody waits for what is not written"
        return True

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unix_s(self, now_s: float) -> float:
        return now_s


async def kept(stored: StoredResponses, given: object, *, streamed: bool) -> bool:
    """Whether a client is told that a response with this id, which it gets, is stored."""
    sent: list[Message] = []

    async def to_client(message: Message) -> None:
        sent.append(message)

    response = {"id": given, "object": "response", "output": []}
    body = json.dumps(response).encode()
    if streamed:
        event = json.dumps({"type": "response.completed", "response": response}).encode()
        body = b"event: response.completed\ndata: %b\n\n" % event
    one = KeptResponse(AsgiSink(to_client), stored, "t", None, [])
    await one.send({"type": "http.response.start", "status": 200, "headers": [EVENTS if streamed else JSON]})
    await one.send({"type": "http.response.body", "body": body})
    head, answer = sent
    if streamed:
        told = json.loads(answer["body"].partition(b"data: ")[2])
        assert told["response"] == response
        return told.get("durable", True) is True
    assert answer["body"] == body
    return (b"plait-durable", b"false") not in head["headers"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "given", ["r\0", "r\n", "", "r" * 3_000, "r r", "é", None, 5, {"r": 1}], ids=lambda given: repr(given)[:9]
)
async def test_a_response_without_an_id_is_answered_and_not_stored(given: object, streamed: bool) -> None:
    log = Written()
    stored = StoredResponses(10**6, 60.0, log)
    assert not await kept(stored, given, streamed=streamed)
    assert (log.names, stored.unnamed, stored.size_bytes("t")) == ([], 1, 0)
    (counter,) = ResponsesCollector(stored).collect()
    assert [sample.value for sample in counter.samples] == [1]
    if isinstance(given, str):
        with pytest.raises(CallerError, match="not found: it was not stored"):
            at_once(stored.said_before("t", given, lambda _size: None, 0.0))


@pytest.mark.parametrize("kind", [["response.completed"], {}, 5, "response.created"])
async def test_an_event_of_another_type_is_passed_on(kind: object) -> None:
    sent: list[Message] = []

    async def to_client(message: Message) -> None:
        sent.append(message)

    log = Written()
    one = KeptResponse(AsgiSink(to_client), StoredResponses(10**6, 60.0, log), "t", None, [])
    event = json.dumps({"type": kind, "says": "response.completed", "response": {"id": "resp_1"}}).encode()
    one.start(200, [EVENTS])
    one.end(b"data: %b\n\n" % event)
    await one.flush()
    assert (sent[-1]["body"], log.names) == (b"data: %b\n\n" % event, [])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("given", ["resp_68af4030592c81938ec0a5fbab4a3e9f05438e46b5f69a3b", "resp_" + "bGl0=" * 60])
async def test_ids_that_engines_choose_are_kept(given: str, streamed: bool) -> None:
    log = Written()
    stored = StoredResponses(10**6, 60.0, log)
    assert await kept(stored, given, streamed=streamed)
    assert (log.names, stored.unnamed) == ([given], 0)
