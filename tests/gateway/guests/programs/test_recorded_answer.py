"""Recorded answers: followers see the same response, whenever they come, and a held stream shows that it lives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import EngineError, LimitError
from plait.gateway.guests.programs.recorded_answer import KEEP_ALIVE, MAX_LAG_BYTES, MESSAGE_BYTES, RecordedAnswer
from tests.waiting import WITHIN_S

START: dict[str, Any] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}
ONE: dict[str, Any] = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
LAST: dict[str, Any] = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}
SIZE = 3 * MESSAGE_BYTES + len(ONE["body"]) + len(LAST["body"])
ECHO = [(b"plait-session", b"s")]
LOST = EngineError("engine lost")
BEYOND = LimitError("too much")


class Budget:
    """The ledger of one answer: at most `limit` bytes, half of which may be kept."""

    def __init__(self, limit: int = 10**9) -> None:
        self.limit, self.bytes = limit, 0

    def keep(self, size_bytes: int) -> bool:
        if self.bytes + size_bytes > self.limit // 2:
            return False
        self.bytes += size_bytes
        return True

    def hold(self, size_bytes: int) -> None:
        if self.bytes + size_bytes > self.limit:
            raise BEYOND
        self.bytes += size_bytes

    def free(self, size_bytes: int) -> None:
        self.bytes -= size_bytes
        assert self.bytes >= 0


def kept_answer() -> RecordedAnswer:
    return RecordedAnswer(Budget(), keeps=True)


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


async def write(answer: RecordedAnswer, message: Any) -> None:
    """Put a message, and wait until there is room for the next, as a writer has to."""
    room = asyncio.Event()
    answer.on_room = room.set
    answer.put(message)
    while answer.is_full:
        await room.wait()
        room.clear()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_followers_early_and_late_get_the_same() -> None:
    answer, early, late = kept_answer(), Client(), Client()
    following = asyncio.create_task(answer.follow(early.send, ECHO))
    await settle()
    for message in (START, ONE):
        await write(answer, message)
    await settle()
    assert len(early.sent) == 2
    await write(answer, LAST)
    await following
    await answer.follow(late.send, ECHO)
    assert early.sent == late.sent == [START, ONE, LAST]
    assert (answer.ended, answer.window.keeps, answer.window.buffered_bytes) == (True, True, SIZE)


async def test_what_is_dropped_is_still_read_by_those_who_follow() -> None:
    answer, client = kept_answer(), Client()
    following = asyncio.create_task(answer.follow(client.send, ()))
    await settle()
    for message in (START, ONE, LAST):
        await write(answer, message)
    answer.window.drop()
    await following
    assert client.sent == [START, ONE, LAST]
    assert not answer.window.keeps


async def test_a_failure_before_the_first_byte_is_raised() -> None:
    answer, client = kept_answer(), Client()
    following = asyncio.create_task(answer.follow(client.send, (), keep_alive_s=60.0))
    await settle()
    answer.fail(LOST)
    with pytest.raises(EngineError):
        await following
    with pytest.raises(EngineError):
        await answer.follow(client.send, ())
    assert client.sent == []


async def test_a_failure_later_is_an_event() -> None:
    answer, client = kept_answer(), Client()
    following = asyncio.create_task(answer.follow(client.send, ()))
    await settle()
    for message in (START, ONE):
        await write(answer, message)
    answer.fail(LOST)
    await following
    assert client.body == ONE["body"] + b"data: " + LOST.body() + b"\n\n"
    assert client.ended


async def test_a_failure_after_the_end_is_none() -> None:
    answer, client = kept_answer(), Client()
    following = asyncio.create_task(answer.follow(client.send, ()))
    await settle()
    for message in (START, LAST):
        await write(answer, message)
    answer.fail(LOST)
    await following
    assert client.sent == [START, LAST]


async def waiting(answer: RecordedAnswer, client: Client) -> asyncio.Task[None]:
    """A follower that has been sent two comments."""
    following = asyncio.create_task(answer.follow(client.send, ECHO, keep_alive_s=0.001))
    await client.third.wait()
    assert (client.sent[0]["status"], client.sent[0]["headers"][-1]) == (200, ECHO[0])
    assert client.sent[1]["body"] == KEEP_ALIVE
    return following


async def test_a_stream_that_waits_is_kept_alive_and_then_goes_on() -> None:
    answer, client = kept_answer(), Client()
    following = await waiting(answer, client)
    for message in (START, ONE, LAST):
        await write(answer, message)
    await following
    assert client.body.replace(KEEP_ALIVE, b"") == ONE["body"] + LAST["body"]
    assert [message["type"] for message in client.sent].count("http.response.start") == 1


async def test_a_stream_that_is_silent_amid_its_events_is_kept_alive() -> None:
    answer, client = kept_answer(), Client()
    answer.put(START)
    answer.put(ONE)
    following = asyncio.create_task(answer.follow(client.send, ECHO, keep_alive_s=0.001))
    await asyncio.wait_for(client.third.wait(), WITHIN_S)
    assert client.sent[:3] == [START, ONE, {**ONE, "body": KEEP_ALIVE}]
    answer.put({**LAST, "more_body": True})
    await asyncio.sleep(0.01)  # the engine has not ended its stream yet
    answer.put({**LAST, "body": b""})
    await following
    assert client.body.replace(KEEP_ALIVE, b"") == ONE["body"] + LAST["body"]
    assert client.body.endswith(LAST["body"])


async def test_after_a_comment_errors_are_events() -> None:
    answer, client = kept_answer(), Client()
    following = await waiting(answer, client)
    answer.fail(LOST)
    await following
    assert client.body.replace(KEEP_ALIVE, b"") == b"data: " + LOST.body() + b"\n\n"
    assert client.ended


async def test_after_a_comment_an_engines_refusal_is_an_event() -> None:
    answer, client = kept_answer(), Client()
    following = await waiting(answer, client)
    await write(answer, {**START, "status": 400})
    await write(answer, {"type": "http.response.body", "body": b'{"error":\n{}}'})
    await following
    assert client.body.replace(KEEP_ALIVE, b"") == b'data: {"error": {}}\n\n'
    assert client.ended


async def test_what_a_follower_has_seen_is_not_taken_back() -> None:
    answer, client = kept_answer(), Client()
    following = asyncio.create_task(answer.follow(client.send, ECHO))
    await write(answer, START)
    await settle()
    assert not answer.take_back()
    await write(answer, LAST)
    await following
    assert client.sent == [START, LAST]


async def test_a_follower_that_goes_leaves_nothing() -> None:
    answer = kept_answer()
    following = asyncio.create_task(answer.follow(Client().send, ()))
    await settle()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert answer._waiting == []


# Slow followers, and the bytes that are held.


def piece(size_bytes: int) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"x" * size_bytes, "more_body": True}


class Slow:
    """A client that takes a message when it is told to."""

    def __init__(self, answer: RecordedAnswer) -> None:
        self.sent: list[Any] = []
        self._may_take = asyncio.Semaphore(0)
        self.following = asyncio.create_task(answer.follow(self._send, ()))

    async def _send(self, message: Any) -> None:
        await self._may_take.acquire()
        self.sent.append(message)

    async def take(self, messages: int = 1) -> None:
        for _ in range(messages):
            self._may_take.release()
        await settle()

    async def leave(self) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)


@pytest.mark.parametrize("keeps", [True, False])
async def test_the_writer_waits_for_the_slowest_follower(keeps: bool) -> None:
    budget = Budget()
    answer = RecordedAnswer(budget, keeps=keeps)
    slow, slower = Slow(answer), Slow(answer)
    await settle()
    await write(answer, START)
    writing = asyncio.create_task(write(answer, piece(MAX_LAG_BYTES)))
    await settle()
    await slow.take(2)
    assert not writing.done()
    await slower.take(2)
    assert writing.done()
    writing = asyncio.create_task(write(answer, piece(MAX_LAG_BYTES + 1)))
    await slow.take()
    assert not writing.done()
    await slower.leave()
    await settle()
    assert writing.done()
    assert (answer.window.buffered_bytes == 0) == (not keeps)
    await write(answer, LAST)
    await slow.take()
    assert slow.following.done()
    assert budget.bytes == answer.window.buffered_bytes


async def test_without_followers_only_what_is_kept_is_held() -> None:
    budget = Budget(2 * 10_000)
    answer = RecordedAnswer(budget, keeps=True)
    for message in (START, piece(5_000)):
        await write(answer, message)
    assert (answer.window.keeps, budget.bytes) == (True, 5_000 + 2 * MESSAGE_BYTES)
    await write(answer, piece(5_000))
    assert (answer.window.keeps, answer.window.buffered_bytes, budget.bytes) == (False, 0, 0)
    for _ in range(1_000):
        await write(answer, piece(5_000))
    assert (answer.window.buffered_bytes, answer.take_back()) == (0, True)


async def test_a_follower_that_the_budget_does_not_allow_is_told() -> None:
    answer = RecordedAnswer(Budget(10_000), keeps=False)
    slow = Slow(answer)
    await settle()
    await write(answer, START)
    await write(answer, piece(5_000))
    with pytest.raises(LimitError) as caught:
        await write(answer, piece(5_000))
    answer.fail(caught.value)
    await slow.take(3)
    assert slow.sent[-1]["body"] == b"data: " + BEYOND.body() + b"\n\n"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from([0, 1, 700_000, MAX_LAG_BYTES + 1])),
        st.tuples(st.sampled_from(["take", "leave"]), st.integers(0, 3)),
        st.tuples(st.sampled_from(["follow", "drop"]), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS, st.booleans(), st.sampled_from([2**20, 5 * 2**20, 10**9]))
def test_every_follower_gets_the_same_and_the_lag_is_bounded(
    steps: list[tuple[str, int]], keeps: bool, limit: int
) -> None:
    """The oracle is the list of all messages that the writer has sent."""
    asyncio.run(_drive(steps, limit, keeps=keeps))


async def _drive(steps: list[tuple[str, int]], limit: int, *, keeps: bool) -> None:
    budget = Budget(limit)
    answer = RecordedAnswer(budget, keeps=keeps)
    followers, sent = [Slow(answer)], list[Any]()
    writing: asyncio.Task[None] | None = None
    is_late = False
    await settle()
    for step, number in [("send", -1), *steps]:
        if step == "send" and (writing is None or writing.done()):
            sent.append(START if number < 0 else piece(number))
            writing = asyncio.create_task(write(answer, sent[-1]))
        elif step == "follow" and answer.window.keeps:
            followers.append(Slow(answer))
        elif step == "drop":
            answer.window.drop()
        elif step == "take" and number < len(followers):
            await followers[number].take()
        elif step == "leave" and number < len(followers):
            await followers.pop(number).leave()
        await settle()
        assert writing is not None
        if writing.done() and writing.exception() is not None:
            assert isinstance(writing.exception(), LimitError)
            sent.pop()
            break
        assert all(follower.sent == sent[: len(follower.sent)] for follower in followers)
        lag = max((sum(map(size, sent[len(f.sent) :])) for f in followers), default=0)
        assert answer.window.lag_bytes == lag
        is_late = step == "follow" or (is_late and step != "send")
        assert writing.done() or lag > MAX_LAG_BYTES
        assert not writing.done() or lag <= MAX_LAG_BYTES or is_late, "a late follower stops the next message"
        assert budget.bytes == answer.window.buffered_bytes == (sum(map(size, sent)) if answer.window.keeps else lag)
    error = LOST
    answer.fail(error)
    for follower in followers:
        await follower.take(len(sent) + 1)
        assert follower.sent[: len(sent)] == sent
        assert follower.following.done()
        follower.following.exception()
    await settle()
    assert (budget.bytes, answer.window.buffered_bytes) == (0, 0)
    if writing is not None and not writing.done():
        writing.cancel()


def size(message: Any) -> int:
    return MESSAGE_BYTES + len(message.get("body", b""))
