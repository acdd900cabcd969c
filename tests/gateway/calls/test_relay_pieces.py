"""However an answer is cut, delayed or left: its client has a beginning of what the engine sent, and no other byte."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.asgi import PART_BYTES, ClientGoneError
from plait.gateway.server.served_request import JOINED_BYTES
from tests.gateway.calls import scripted_engines
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    JSON,
    LOST,
    STREAM,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    gateway,
)
from tests.gateway.server.fake_connection import FakeConnection, Read

EVENTS = [
    b'data: {"choices":[{"index":0,"text":"w\xc3\xb6rld \xf0\x9f\x8c\x8d"}]}\n\n',
    b"data: 1\r\n\r\n",
    b": a comment\n\n",
    b"event: x\nid: 1\ndata: {\ndata: }\n\n",
]
streams = st.lists(st.sampled_from(EVENTS), min_size=1, max_size=6).map(
    lambda events: b"".join([*events, FINISH, DONE])
)
cuts = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=8)
"""The sizes of the pieces, over and over, and the turns of the loop before each."""
patience = st.lists(st.integers(0, 3), min_size=1, max_size=4)
"""The turns of the loop that the client takes for each message, over and over."""


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class SlowClient(Client):
    """Takes some turns of the loop for each message."""

    def __init__(self, patience: Sequence[int]) -> None:
        super().__init__()
        self._patience = patience

    async def send(self, message: Any) -> None:
        await turns(self._patience[len(self.sent) % len(self._patience)])
        await super().send(message)


async def play(exchange: Exchange, answer: bytes, cuts: Sequence[tuple[int, int]], *, is_lost: bool) -> None:
    """Send an answer in pieces, as an engine would. It may be lost before its end."""
    at = number = 0
    while at < len(answer):
        size, pause = cuts[number % len(cuts)]
        await turns(pause)
        exchange.response.pieces.append(answer[at : at + size])
        exchange.response.wake()
        at, number = at + size, number + 1
    if is_lost:
        exchange.response.fail(LOST)
    else:
        exchange.response.finish()


class ServedReader:
    """The same over a connection's own sink: the client does not read for some turns of the loop after each write."""

    def __init__(self, patience: Sequence[int]) -> None:
        self.connection = FakeConnection()
        self._patience = patience

    async def read(self) -> None:
        """Read until the test ends."""
        number = 0
        while True:
            self.connection.pause()
            await turns(self._patience[number % len(self._patience)])
            self.connection.resume()
            number += 1
            await asyncio.sleep(0)

    @property
    def answer(self) -> Read:
        """What has come."""
        return Read(b"".join(self.connection.transport.written))


async def served(
    answer: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    cuts: Sequence[tuple[int, int]],
    patience: Sequence[int],
    *,
    leaves_after: int | None = None,
    is_lost: bool = False,
) -> ServedReader:
    """As `delivered`, over a connection's own sink and without a task."""
    exchange, reader, ended = Exchange(headers=headers, pieces=[None]), ServedReader(patience), asyncio.Event()
    async with gateway(FakeHttp(exchange, exchange, exchange)) as made:
        reading = asyncio.create_task(reader.read())
        delivery = made.relay.begin(made.asked(), reader.connection.client, lambda _error: ended.set())
        engine = asyncio.create_task(play(exchange, answer, cuts, is_lost=is_lost))
        if leaves_after is not None:
            await turns(leaves_after)
            if not ended.is_set():
                reader.connection.transport.close()
                made.relay.cancel(delivery)
                ended.set()
        await ended.wait()
        reading.cancel()
        engine.cancel()
        await asyncio.gather(reading, engine, return_exceptions=True)
    return reader


async def delivered(
    answer: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    cuts: Sequence[tuple[int, int]],
    patience: Sequence[int],
    *,
    leaves_after: int | None = None,
    is_lost: bool = False,
) -> Client:
    """A client, once it has its answer or has left, and all books are at zero."""
    exchange = Exchange(headers=headers, pieces=[None])
    client = SlowClient(patience)
    async with gateway(FakeHttp(exchange, exchange, exchange)) as made:
        call = asyncio.create_task(made.deliver(client))
        engine = asyncio.create_task(play(exchange, answer, cuts, is_lost=is_lost))
        if leaves_after is not None:
            await turns(leaves_after)
            client.gone.set()
        await asyncio.gather(call, return_exceptions=True)
        error = call.exception()
        assert error is None or isinstance(error, ClientGoneError) or is_lost
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
    return client


@given(streams, cuts, patience)
def test_a_stream_is_the_same_bytes(answer: bytes, cuts: list[tuple[int, int]], patience: list[int]) -> None:
    client = asyncio.run(delivered(answer, STREAM, cuts, patience))
    assert (client.body, client.ended) == (answer, True)


@given(streams, cuts, patience)
def test_a_stream_is_the_same_bytes_over_a_connection(
    answer: bytes, cuts: list[tuple[int, int]], patience: list[int]
) -> None:
    read = asyncio.run(served(answer, STREAM, cuts, patience)).answer
    assert (read.body, read.has_ended) == (answer, True)


@given(cuts, patience)
def test_a_whole_answer_is_the_same_bytes_over_a_connection(cuts: list[tuple[int, int]], patience: list[int]) -> None:
    read = asyncio.run(served(WHOLE, JSON, cuts, patience)).answer
    assert (read.body, read.has_ended) == (WHOLE, True)


@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize("size_bytes", [JOINED_BYTES + 1, PART_BYTES, 3 * PART_BYTES + 7])
async def test_a_long_whole_answer_is_written_once(
    size_bytes: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client always has room: what it is told then comes while the answer is being written."""
    monkeypatch.setattr(scripted_engines, "MAX_OPEN_ANSWER_BYTES", 2**21)
    answer = WHOLE[:-1] + b',"more":"%s"}' % (b"x" * size_bytes)
    step = len(answer) // pieces + 1
    sent = [answer[at : at + step] for at in range(0, len(answer), step)]
    connection, ended = FakeConnection(), list[BaseException | None]()
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=sent))) as made:
        made.relay.begin(made.asked(), connection.client, ended.append)
        await turns(9)
        assert (ended, connection.answered) == ([None], 1)
        assert made.outcomes() == {("a", "ok"): 1}
    read = Read(b"".join(connection.transport.written))
    assert (read.body, read.has_ended) == (answer, True)


@pytest.mark.parametrize("status", [200, 400])
async def test_a_client_that_leaves_as_its_call_ends_ends_it_once(status: int) -> None:
    connection, ended = FakeConnection(), list[BaseException | None]()
    async with gateway(FakeHttp(Exchange(status, JSON, [WHOLE]))) as made:
        delivery = made.relay.begin(made.asked(), connection.client, ended.append)
        await turns(9)
        outcomes = made.outcomes()
        made.relay.cancel(delivery)
        assert (ended, made.outcomes()) == ([None], outcomes)


@given(streams, cuts, patience, st.integers(0, 60))
def test_a_client_that_leaves_a_connection_has_whole_events(
    answer: bytes, cuts: list[tuple[int, int]], patience: list[int], leaves_after: int
) -> None:
    reader = asyncio.run(served(answer, STREAM, cuts, patience, leaves_after=leaves_after))
    body = reader.answer.body if reader.connection.transport.written else b""
    assert answer.startswith(body)
    assert body.endswith((b"\n\n", b"\r\n\r\n")) or not body


@given(streams, cuts, patience)
def test_a_stream_that_is_lost_ends_with_an_error_over_a_connection(
    answer: bytes, cuts: list[tuple[int, int]], patience: list[int]
) -> None:
    lost = answer[: -len(FINISH + DONE)] + b"data: half of"
    reader = asyncio.run(served(lost, STREAM, cuts, patience, is_lost=True))
    if reader.connection.transport.written:
        begun, error, _ = reader.answer.body.rpartition(b'data: {"error"')
        assert error
        assert reader.answer.has_ended
        assert lost.startswith(begun)
        assert b"half of" not in reader.answer.body


@given(cuts, patience)
def test_a_whole_answer_is_the_same_bytes(cuts: list[tuple[int, int]], patience: list[int]) -> None:
    client = asyncio.run(delivered(WHOLE, JSON, cuts, patience))
    assert (client.body, client.ended) == (WHOLE, True)


@given(streams, cuts, patience, st.integers(0, 60))
def test_a_client_that_leaves_has_whole_events(
    answer: bytes, cuts: list[tuple[int, int]], patience: list[int], leaves_after: int
) -> None:
    client = asyncio.run(delivered(answer, STREAM, cuts, patience, leaves_after=leaves_after))
    assert answer.startswith(client.body)
    assert client.body.endswith((b"\n\n", b"\r\n\r\n")) or not client.body


@given(streams, cuts, patience)
def test_a_stream_that_is_lost_ends_with_an_error_behind_whole_events(
    answer: bytes, cuts: list[tuple[int, int]], patience: list[int]
) -> None:
    lost = answer[: -len(FINISH + DONE)] + b"data: half of"
    client = asyncio.run(delivered(lost, STREAM, cuts, patience, is_lost=True))
    if client.sent:
        begun, error, _ = client.body.rpartition(b'data: {"error"')
        assert error
        assert lost.startswith(begun)
        assert b"half of" not in client.body
