"""Readers of a response in the background: each gets all events from its number on, as it has room for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from plait.backends.errors import EngineError, EngineGarbledError
from plait.backends.translation.answer_translator import Identity
from plait.gateway.asgi import Nowhere
from plait.gateway.guests.programs.recorded_answer import KEEP_ALIVE
from plait.gateway.guests.responses.background_answer import BackgroundAnswer, events_from
from tests.waiting import WITHIN_S


class Reader(Nowhere):
    """A client that has no room while it `is_full`."""

    is_full = False

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.commented = asyncio.Event()

    async def send(self, message: Any) -> None:
        assert message["status"] == 200

    def write(self, body: bytes) -> None:
        assert not self.is_full
        self.written.append(body)
        if self.written.count(KEEP_ALIVE) == 2:
            self.commented.set()

    def end(self, body: bytes = b"") -> None:
        self.written.append(body)

    @property
    def events(self) -> bytes:
        return b"".join(self.written).replace(KEEP_ALIVE, b"")


class Unlimited:
    def keep(self, _size_bytes: int) -> bool:
        return True

    def hold(self, size_bytes: int) -> None: ...

    def free(self, size_bytes: int) -> None: ...


def begun() -> BackgroundAnswer:
    answer = BackgroundAnswer({"model": "m"}, Identity("key", 1), Unlimited())
    answer.start(200, [(b"content-type", b"text/event-stream")])
    return answer


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + msgspec.json.encode({"model": "m", "choices": [choice]}) + b"\n\n"


def follow(answer: BackgroundAnswer, reader: Reader, number: int, keep_alive_s: float = 60.0) -> asyncio.Task[None]:
    return asyncio.create_task(answer.follow(reader, (), number, keep_alive_s))


async def told(events: list[bytes]) -> list[bytes]:
    return events


async def test_a_reader_without_room_gets_the_events_once_it_has_some() -> None:
    answer, quick, slow, late = begun(), Reader(), Reader(), Reader()
    following = [follow(answer, quick, 0), follow(answer, slow, 0)]
    await asyncio.sleep(0)
    slow.is_full = True
    for number in range(20):
        answer.write(chunk(f"piece {number:03}"))
    assert len(slow.written) < len(quick.written)
    slow.is_full = False
    assert slow.on_room is not None
    slow.on_room()
    assert slow.events == quick.events
    answer.write(chunk("", "stop") + b"data: [DONE]\n\n")
    assert b"response.completed" not in quick.events, "the end waits for the store"
    answer.finish(told)
    following.append(follow(answer, late, 3))
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*following)
    assert quick.events == slow.events
    assert quick.events.endswith(late.events)
    first = late.events.partition(b"\n\n")[0]
    assert json.loads(first.partition(b"data: ")[2])["sequence_number"] == 3
    assert slow.on_room is None


async def test_a_silent_reader_gets_comments_while_it_has_room() -> None:
    answer, reader = begun(), Reader()
    following = follow(answer, reader, 0, keep_alive_s=0.001)
    async with asyncio.timeout(WITHIN_S):
        await reader.commented.wait()
        reader.is_full = True
        await asyncio.sleep(0.01)  # `write` would raise
        answer.break_off(EngineError("it broke"))
        await following
    assert b"it broke" in reader.written[-1]


async def test_a_reader_that_leaves_is_written_no_more() -> None:
    answer, reader = begun(), Reader()
    following = follow(answer, reader, 0)
    await asyncio.sleep(0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    before = len(reader.written)
    answer.write(chunk("eight ch"))
    assert (len(reader.written), reader.on_room) == (before, None)


async def test_a_reader_that_comes_after_the_end_gets_the_end_and_nothing_more() -> None:
    answer, reader = begun(), Reader()
    answer.write(chunk("eight ch", "stop") + b"data: [DONE]\n\n")
    answer.finish(told)
    await answer.follow(reader, (), 0, keep_alive_s=0.001)
    ended = reader.written[:]
    await asyncio.sleep(0.01)
    assert reader.written == ended
    assert b"response.completed" in ended[-1]


def test_a_reader_beyond_the_end_gets_the_last_event() -> None:
    assert events_from(9, [b"1", b"2"]) == [b"2"]


def test_an_event_that_cannot_be_translated_is_the_engines_failure() -> None:
    answer = begun()
    answer.write(chunk("one"))
    with pytest.raises(EngineGarbledError):
        answer.write(b'data: {"choices": [{"te\n\n')
    assert json.loads(answer.response)["status"] == "failed"
    answer.take_back()
    answer.start(200, [(b"content-type", b"text/event-stream")])
    answer.write(chunk("one", "stop") + b"data: [DONE]\n\n")
    assert (answer.problem, json.loads(answer.response)["status"]) == (None, "completed")
