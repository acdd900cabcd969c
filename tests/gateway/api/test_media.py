"""Routes whose answers are of any type: they reach the client byte for byte, as they come, or visibly broken."""

from __future__ import annotations

import asyncio
import json

import pytest
from structlog.testing import capture_logs

from tests.gateway.api.served_gateway import Reply, Served, request, serving

SPEECH, IMAGES, EMBEDDINGS, POOLING = "/v1/audio/speech", "/v1/images/generations", "/v1/embeddings", "/pooling"
AUDIO = bytes(range(256)) * 300 + b"\xed\xa0\x80\\ud83d"
"""Of every byte, and what in a text would be half a surrogate pair."""


def engine_says(body: bytes, kind: str, *, length: int | None = None) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body) if length is None else length}"
    return f"{head}\r\nconnection: close\r\n\r\n".encode() + body


async def asked(made: Served, path: str, **fields: object) -> bytes:
    return await made.send(request(json.dumps({"model": "m", "input": "Hi", **fields}).encode(), path=path))


@pytest.mark.parametrize("path", [SPEECH, IMAGES, EMBEDDINGS, POOLING])
@pytest.mark.parametrize("body", [AUDIO, b" \n" + AUDIO, AUDIO[:3]], ids=["long", "blank first", "short"])
async def test_an_answer_of_any_type_reaches_the_client_as_it_is(path: str, body: bytes) -> None:
    async with serving() as made:
        made.answer = engine_says(body, "audio/wav")
        reply = Reply.of(await asked(made, path))
        assert made.counted == 1
    assert (reply.status, reply.headers["content-type"], reply.body) == (200, "audio/wav", body)
    assert reply.headers["plait-engine"] == "a"


@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream_format": "sse"}])
async def test_events_of_any_form_pass(stream: dict[str, object]) -> None:
    events = b'data: {"type": "speech.audio.delta", "audio": "AA=="}\n\ndata: {"type": "speech.audio.done"}\n\n'
    async with serving() as made:
        made.answer = engine_says(events, "text/event-stream")
        assert Reply.of(await asked(made, SPEECH, **stream)).body == events


async def test_json_is_read_for_its_usage_and_errors() -> None:
    body = json.dumps({"created": 1, "data": [{"b64_json": "AA=="}], "usage": {"prompt_tokens": 1}}).encode()
    async with serving() as made:
        made.answer = engine_says(body, "application/json")
        reply = Reply.of(await asked(made, IMAGES))
    assert (reply.body, reply.headers["content-length"]) == (body, str(len(body)))


async def test_an_answer_that_breaks_off_has_no_end() -> None:
    async with serving("a", "b") as made:
        made.answer = engine_says(AUDIO, "audio/wav", length=len(AUDIO) + 1)
        data = await asked(made, SPEECH)
        assert made.counted == 1
    assert data.startswith(b"HTTP/1.1 200")
    assert AUDIO[-100:] in data
    assert not data.endswith(b"0\r\n\r\n"), "a client sees that it is not whole"


async def test_before_the_first_byte_another_engine_is_asked() -> None:
    async with serving("a", "b") as made:
        made.answer = engine_says(b"", "audio/wav", length=9)
        made.answers = {"b": engine_says(AUDIO, "audio/wav")}
        replies = [Reply.of(await asked(made, SPEECH)) for _ in range(4)]
    found = {(reply.status, reply.body == AUDIO, reply.headers["plait-engine"]) for reply in replies}
    assert found == {(200, True, "b")}


@pytest.mark.parametrize("body", [b"", b"\n"])
async def test_an_empty_answer_is_one(body: bytes) -> None:
    async with serving() as made:
        made.answer = engine_says(body, "text/plain")
        replies = [Reply.of(await asked(made, SPEECH)) for _ in range(4)]
        assert made.gateway.kernel.router.engines["a"].health.takes_calls
    assert {(reply.status, reply.body) for reply in replies} == {(200, body)}


async def test_a_receipt_is_in_the_head_alone() -> None:
    async with serving() as made:
        made.answer = engine_says(AUDIO, "audio/wav")
        reply = Reply.of(await asked(made, SPEECH, plait={"receipt": True}))
    assert "plait-receipt" in reply.headers
    assert reply.body == AUDIO


async def test_a_client_that_goes_in_the_middle_has_no_answer() -> None:
    async with serving() as made:
        made.answer = engine_says(AUDIO, "audio/wav", length=10**9)
        with capture_logs() as logs:
            await made.head(request(b'{"model": "m", "input": "Hi"}', path=SPEECH))
            await asyncio.sleep(0.1)
    (line,) = [entry for entry in logs if entry["event"] == "call"]
    assert (line["outcome"], line["status"]) in {("client_gone", 499), ("failed", 200)}


async def test_a_client_that_goes_frees_the_engine() -> None:
    async with serving() as made:
        made.answer = None
        await made.send(request(b'{"model": "m", "input": "Hi"}', path=SPEECH), answered=False)
        await asyncio.sleep(0.1)
        assert made.gateway.kernel.router.engines["a"].view.outstanding == 0
