"""Answers that are held until they are whole: their bytes count, over all calls, for as long as they are held."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc

import pytest

import plait.gateway.answers.completions
import plait.gateway.calls.upstream
from plait.backends.errors import AnswerTooLargeError, EngineError, LimitError, PlaitError
from plait.backends.http.connection import Gathered
from plait.gateway.answers.completions import COMPLETION, LONG_BYTES, UNKNOWN, AnswerForm, EventStream
from plait.gateway.answers.other_answers import OBJECT
from plait.gateway.calls.open_answers import OpenAnswer, OpenAnswers
from plait.gateway.guests.translation.typed_answers import MESSAGE, RESPONSE
from tests.gateway.calls.scripted_engines import (
    JSON,
    MAX_OPEN_ANSWER_BYTES,
    STREAM,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    gateway,
    until_stuck,
)
from tests.gateway.exposed import samples

USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


def whole(size: int) -> bytes:
    """An answer of so many bytes."""
    return WHOLE[:-1] + b', "x": "' + b"x" * (size - len(WHOLE) - 9) + b'"}'


class Place:
    """Has room for `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.buffered_bytes = 0
        self.limit = limit

    def hold(self, size_bytes: int) -> None:
        if self.buffered_bytes + size_bytes > self.limit:
            raise LimitError("full")
        self.buffered_bytes += size_bytes

    def free(self, size_bytes: int) -> None:
        self.buffered_bytes -= size_bytes


def test_the_bytes_of_all_answers_are_bounded() -> None:
    answers = OpenAnswers(100)
    with OpenAnswer(answers) as one, OpenAnswer(answers) as other:
        one.hold(60)
        other.hold(40)
        with pytest.raises(AnswerTooLargeError, match="more than 100 bytes") as caught:
            one.hold(1)
        assert (caught.value.status, caught.value.code) == (502, "answer_too_large")
        assert repr(answers) == "OpenAnswers(100 of 100 bytes)"
        other.end()
        one.hold(40)
    assert answers.buffered_bytes == 0


def test_an_answer_that_has_no_room_in_one_place_leaves_all() -> None:
    answers, place = OpenAnswers(100), Place(50)
    with OpenAnswer(answers, place) as answer:
        answer.hold(40)
        with pytest.raises(LimitError):
            answer.hold(20)
    assert (answers.buffered_bytes, place.buffered_bytes) == (0, 0)
    with OpenAnswer(answers, place) as answer:
        answer.hold(40)
        answer.end_in(place)
        assert (answers.buffered_bytes, place.buffered_bytes) == (40, 0)
    assert answers.buffered_bytes == 0


async def test_an_answer_counts_until_its_client_has_it() -> None:
    engines = [FakeHttp(Exchange(headers=JSON, pieces=[whole(2_000)])) for _ in "ab"]
    engines[0].answers.append(Exchange(headers=JSON, pieces=[whole(2_000)]))
    async with gateway(*engines) as made:
        slow, fast = Client(stuck_at=1), Client()
        reading = asyncio.create_task(made.deliver(slow))
        await until_stuck()
        assert made.open_answers.buffered_bytes == 2_000
        with pytest.raises(AnswerTooLargeError):
            await made.deliver(fast)
        assert (made.open_answers.buffered_bytes, fast.sent) == (2_000, [])
        assert made.outcomes() == {("b", "refused"): 1}
        assert made.router.engines["b"].health.state == "up"
        assert len(engines[0].answers) == 1, "it is not tried again"
        slow.gone.set()
        await asyncio.gather(reading, return_exceptions=True)
        assert made.open_answers.buffered_bytes == 0
        await made.deliver(fast)
        assert len(fast.body) == 2_000


@pytest.mark.parametrize("end", [EngineError("lost"), b"<html>", None], ids=["lost", "garbled", "stalled"])
async def test_what_has_come_counts_no_more_however_the_call_ends(end: bytes | EngineError | None) -> None:
    pieces = [whole(2_000)[:1_500], end]
    engines = [FakeHttp(*(Exchange(headers=JSON, pieces=pieces) for _ in range(3))) for _ in "ab"]
    async with gateway(*engines) as made:
        client = Client()
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        client.gone.set()
        await asyncio.gather(task, return_exceptions=True)
        assert made.open_answers.buffered_bytes == 0


async def test_one_answer_that_is_larger_than_all_may_be() -> None:
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[whole(MAX_OPEN_ANSWER_BYTES + 1)]))) as made:
        with pytest.raises(AnswerTooLargeError):
            await made.deliver(Client())
        assert not [name for name in samples(made.registry) if name.startswith("plait_call_failures_total{")]


@pytest.mark.parametrize(
    ("headers", "size"),
    [(JSON, MAX_OPEN_ANSWER_BYTES + 1), (JSON, 2_500), (STREAM, 2_500)],
    ids=["of all answers", "of one answer", "of one event"],
)
async def test_a_refused_answer_leaves_memory_at_once(
    monkeypatch: pytest.MonkeyPatch, headers: list[tuple[bytes, bytes]], size: int
) -> None:
    """Without the garbage collector: the traceback of its error has the buffer, and the call has the error."""
    monkeypatch.setattr(plait.gateway.calls.upstream, "MAX_ANSWER_BYTES", 2_000)
    monkeypatch.setattr(plait.gateway.answers.completions, "MAX_EVENT_BYTES", 2_000)
    endless = [Exchange(headers=headers, pieces=[b"data: " + b"x" * size, None]) for _ in range(3)]
    async with gateway(*(FakeHttp(one) for one in endless)) as made:
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(PlaitError):
                await made.deliver(Client())
            assert made.seen.ended_calls, "the last calls are still looked at"
            assert [one for one in gc.get_objects() if isinstance(one, Gathered | EventStream)] == []
        finally:
            gc.enable()


LONG = "é" * 4 * LONG_BYTES
ANSWERS: dict[str, tuple[AnswerForm, dict[str, object]]] = {
    "completion": (COMPLETION, {"choices": [{"index": 0, "message": {"content": LONG}, "finish_reason": "stop"}]}),
    "response": (RESPONSE, {"status": "completed", "output": [{"text": LONG}]}),
    "message": (MESSAGE, {"type": "message", "stop_reason": "end_turn", "content": [{"text": LONG}]}),
    "object": (OBJECT, {"data": [{"embedding": [0.5] * 100_000, "text": LONG}]}),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_long_answer_is_read_without_its_text(kind: str) -> None:
    form, fields = ANSWERS[kind]
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
    usage = USAGE if kind in ("completion", "object") else {names[name]: count for name, count in USAGE.items()}
    answer = bytearray(json.dumps({**fields, "usage": usage}, ensure_ascii=False).encode())
    tracemalloc.start()
    try:
        read = form.whole("e", answer, UNKNOWN)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read.usage is not None
    assert (read.usage.prompt_tokens, read.usage.output_tokens) == (3, 2)
    assert most_bytes < len(answer) / 2


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices": [{"x": "' + b"x" * LONG_BYTES + b'\xff", "finish_reason": "stop"}]}',
        b'{"choices": [1, "' + b"x" * LONG_BYTES + b'"]}',
        b'{"choices": "' + b"x" * LONG_BYTES + b'"}',
        b'["' + b"x" * LONG_BYTES + b'"]',
        b'{"choices": [{"x": "' + b"x" * LONG_BYTES,
    ],
    ids=["not UTF-8", "no choices", "a text", "an array", "cut"],
)
def test_a_long_answer_that_is_no_completion_fails(answer: bytes) -> None:
    with pytest.raises(EngineError) as caught:
        COMPLETION.whole("e", answer, UNKNOWN)
    assert caught.value.cause in {"garbled", "broken"}
