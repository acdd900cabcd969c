"""Recorded answers: followers see the same response, whenever they come, and a held stream shows that it lives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plait.backends.errors import EngineError
from plait.gateway.programs.recorded_answer import KEEP_ALIVE, RecordedAnswer

START: dict[str, Any] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}
ONE: dict[str, Any] = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
LAST: dict[str, Any] = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}
ECHO = [(b"plait-session", b"s")]
LOST = EngineError("engine lost")


class Client:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.third = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if len(self.sent) == 3:
            self.third.set()

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def ended(self) -> bool:
        return not self.sent[-1].get("more_body", False)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_followers_early_and_late_get_the_same() -> None:
    answer, early, late = RecordedAnswer(), Client(), Client()
    following = asyncio.create_task(answer.follow(early.send, ECHO))
    await settle()
    for message in (START, ONE):
        await answer.send(message)
    await settle()
    assert len(early.sent) == 2
    await answer.send(LAST)
    await following
    await answer.follow(late.send, ECHO)
    assert early.sent == late.sent == [START, ONE, LAST]
    assert (answer.ended, answer.kept, answer.size_bytes) == (True, True, len(ONE["body"]) + len(LAST["body"]))


async def test_what_is_dropped_is_still_read_by_those_who_follow() -> None:
    answer, client = RecordedAnswer(), Client()
    following = asyncio.create_task(answer.follow(client.send, ()))
    await settle()
    for message in (START, ONE, LAST):
        await answer.send(message)
    answer.drop()
    await following
    assert client.sent == [START, ONE, LAST]
    assert not answer.kept


async def test_a_failure_before_the_first_byte_is_raised() -> None:
    answer, client = RecordedAnswer(), Client()
    following = asyncio.create_task(answer.follow(client.send, (), keep_alive_s=60.0))
    await settle()
    answer.fail(LOST)
    with pytest.raises(EngineError):
        await following
    with pytest.raises(EngineError):
        await answer.follow(client.send, ())
    assert client.sent == []


async def test_a_failure_later_is_an_event() -> None:
    answer, client = RecordedAnswer(), Client()
    for message in (START, ONE):
        await answer.send(message)
    answer.fail(LOST)
    await answer.follow(client.send, ())
    assert client.body == ONE["body"] + b"data: " + LOST.body() + b"\n\n"
    assert client.ended


async def test_a_failure_after_the_end_is_none() -> None:
    answer, client = RecordedAnswer(), Client()
    for message in (START, LAST):
        await answer.send(message)
    answer.fail(LOST)
    await answer.follow(client.send, ())
    assert client.sent == [START, LAST]


async def waiting(answer: RecordedAnswer, client: Client) -> asyncio.Task[None]:
    """A follower that has been sent two comments."""
    following = asyncio.create_task(answer.follow(client.send, ECHO, keep_alive_s=0.001))
    await client.third.wait()
    assert (client.sent[0]["status"], client.sent[0]["headers"][-1]) == (200, ECHO[0])
    assert client.sent[1]["body"] == KEEP_ALIVE
    return following


async def test_a_stream_that_waits_is_kept_alive_and_then_goes_on() -> None:
    answer, client = RecordedAnswer(), Client()
    following = await waiting(answer, client)
    for message in (START, ONE, LAST):
        await answer.send(message)
    await following
    assert client.body.replace(KEEP_ALIVE, b"") == ONE["body"] + LAST["body"]
    assert [message["type"] for message in client.sent].count("http.response.start") == 1


async def test_after_a_comment_errors_are_events() -> None:
    answer, client = RecordedAnswer(), Client()
    following = await waiting(answer, client)
    answer.fail(LOST)
    await following
    assert client.body.replace(KEEP_ALIVE, b"") == b"data: " + LOST.body() + b"\n\n"
    assert client.ended


async def test_after_a_comment_an_engines_refusal_is_an_event() -> None:
    answer, client = RecordedAnswer(), Client()
    following = await waiting(answer, client)
    await answer.send({**START, "status": 400})
    await answer.send({"type": "http.response.body", "body": b'{"error":\n{}}'})
    await following
    assert client.body.replace(KEEP_ALIVE, b"") == b'data: {"error": {}}\n\n'
    assert client.ended


@pytest.mark.parametrize("keep_alive_s", [None, 0.001])
async def test_a_failure_that_is_taken_back_was_never_seen(keep_alive_s: float | None) -> None:
    answer, client = RecordedAnswer(), Client()
    following = asyncio.create_task(answer.follow(client.send, ECHO, keep_alive_s))
    if keep_alive_s is not None:
        await client.third.wait()
    await settle()
    for message in ({**START, "status": 503}, LAST):
        await answer.send(message)
    await settle()
    assert answer.take_back()
    assert (answer.ended, answer.size_bytes) == (False, 0)
    for message in (START, ONE, LAST):
        await answer.send(message)
    await following
    assert (client.sent[0]["status"], client.body.replace(KEEP_ALIVE, b"")) == (200, ONE["body"] + LAST["body"])


async def test_a_failure_that_stands_is_seen() -> None:
    answer, client = RecordedAnswer(), Client()
    following = asyncio.create_task(answer.follow(client.send, ECHO))
    failure = {**START, "status": 503}
    for message in (failure, LAST):
        await answer.send(message)
    await settle()
    assert client.sent == []
    answer.fail(LOST)
    await following
    assert client.sent == [failure, LAST]
    assert not answer.take_back()


async def test_what_a_follower_has_seen_is_not_taken_back() -> None:
    answer, client = RecordedAnswer(), Client()
    following = asyncio.create_task(answer.follow(client.send, ECHO))
    await answer.send(START)
    await settle()
    assert not answer.take_back()
    await answer.send(LAST)
    await following
    assert client.sent == [START, LAST]


async def test_a_follower_that_goes_leaves_nothing() -> None:
    answer = RecordedAnswer()
    following = asyncio.create_task(answer.follow(Client().send, ()))
    await settle()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert answer._waiting == []
