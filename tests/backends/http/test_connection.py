"""One connection fed by hand, without a socket: what a response is must not depend on how it was cut into reads."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.backends.errors import EngineError
from plait.backends.http.body import Body
from plait.backends.http.connection import Connection, Response, Timeouts
from tests.examples import examples

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKED = CHUNKED_HEAD + b"3\r\nabc\r\n10;x=y\r\n0123456789abcdef\r\n0\r\nx-trailer: t\r\n\r\n"

Answer = tuple[
    int, list[tuple[bytes, bytes]], bytes, int
]  # status, headers, body, how often the connection became idle


class FakeTransport(asyncio.Transport):
    """A transport with no socket: what is fed to the connection is what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.calls: list[str] = []
        self.written_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


class Fed:
    """A connection without a socket, and the call that it carries."""

    def __init__(self, timeouts: Timeouts | None = None, body: bytes = b"") -> None:
        self.idle: list[Connection] = []
        self.lost: list[Connection] = []
        self.transport = FakeTransport()
        self.connection = Connection("http://fed", timeouts or Timeouts(), 4.0, self)
        self.connection.connection_made(self.transport)
        self.call = asyncio.ensure_future(self._called(body))

    async def _called(self, body: bytes) -> Response:
        response = Response()
        self.connection.begin(response, b"", body)
        return await response.head()

    async def feed(self, *pieces: bytes) -> None:
        await asyncio.sleep(0)  # lets the call begin
        for piece in pieces:
            if piece:
                self.connection.data_received(piece)

    def on_idle(self, connection: Connection) -> None:
        self.idle.append(connection)

    def on_lost(self, connection: Connection) -> None:
        self.lost.append(connection)

    def on_stale(self, _response: Response, _head: bytes, _body: Body) -> None:
        raise AssertionError("a first exchange cannot be stale")


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


async def answer_of(pieces: list[bytes]) -> Answer:
    """What a response read in these pieces comes to."""
    fed = Fed()
    await fed.feed(*pieces)
    response = await fed.call
    return response.status, response.headers, await response.read(), len(fed.idle)


RESPONSES: dict[bytes, Answer] = {
    CHUNKED: (
        200,
        [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")],
        b"abc0123456789abcdef",
        1,
    ),
    OK: (200, [(b"content-length", b"2")], b"ok", 1),
    b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: l\r\n\r\n" + OK: (
        200,
        [(b"content-length", b"2")],
        b"ok",
        1,
    ),
    b"HTTP/1.1 204 No Content\r\nX-Empty:\r\n\r\n": (204, [(b"x-empty", b"")], b"", 1),
    b"HTTP/1.1 429 Slow\r\ncontent-length: 0\r\nconnection: close\r\n\r\n": (
        429,
        [(b"content-length", b"0"), (b"connection", b"close")],
        b"",
        0,
    ),
}


@pytest.mark.parametrize("data", RESPONSES, ids=["chunked", "length", "informational", "empty", "close"])
async def test_a_response_cut_at_any_byte_reads_the_same(data: bytes) -> None:
    for at in range(len(data)):
        assert await answer_of(cut(data, [at])) == RESPONSES[data]
    assert await answer_of([bytes([byte]) for byte in data]) == RESPONSES[data]


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(list(RESPONSES)), st.lists(st.integers(0, 200)))
@example(CHUNKED, [])
def test_a_response_cut_anyhow_reads_the_same(data: bytes, cuts: list[int]) -> None:
    pieces = cut(data, [at for at in cuts if at < len(data)])
    assert asyncio.run(answer_of(pieces)) == RESPONSES[data]


async def test_what_has_piled_up_is_one_piece_and_what_one_read_brought_is_one() -> None:
    fed = Fed()
    await fed.feed(CHUNKED_HEAD + b"1\r\na\r\n1\r\nb\r\n", b"1\r\nc\r\n")
    response = await fed.call
    assert repr(response) == "<Response 200 arriving unread=3>"
    assert await response.read_chunk() == b"abc"
    await fed.feed(b"1\r\nd\r\n0\r\n\r\n")
    assert repr(response) == "<Response 200 complete unread=1>"
    assert [await response.read_chunk() for _ in range(3)] == [b"d", b"", b""]


async def test_an_engine_that_is_held_back_does_not_time_out() -> None:
    fed = Fed(Timeouts(idle_s=0.003))
    await fed.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 100002\r\n\r\n" + bytes(100_000))
    response = await fed.call
    assert fed.transport.calls == ["pause"]
    await asyncio.sleep(0.008)
    assert len(await response.read_chunk()) == 100_000
    assert fed.transport.calls == ["pause", "resume"]
    fed.connection.data_received(b"ok")
    assert await response.read() == b"ok"


async def test_the_wait_for_the_first_token_is_no_silence() -> None:
    fed = Fed(Timeouts(idle_s=0.003))
    await fed.feed(CHUNKED_HEAD)
    response = await fed.call
    await asyncio.sleep(0.008)
    await fed.feed(b"2\r\nok\r\n0\r\n\r\n")
    assert await response.read() == b"ok"


async def test_the_end_of_the_body_is_told_from_the_end_of_the_connection() -> None:
    for head in (b"content-length: 4", b"transfer-encoding: chunked", b"transfer-encoding: gzip, Chunked"):
        fed = Fed()
        await fed.feed(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        response = await fed.call
        fed.connection.eof_received()
        with pytest.raises(EngineError, match="http://fed closed the connection in the middle"):
            await response.read()
    for head in (b"x: y", b"transfer-encoding: gzip"):
        fed = Fed()
        await fed.feed(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\nab")
        response = await fed.call
        fed.connection.eof_received()
        assert await response.read() == b"ab"
        assert fed.transport.closed


async def test_a_reset_is_never_the_end_of_a_body() -> None:
    fed = Fed()
    await fed.feed(b"HTTP/1.1 200 OK\r\n\r\nab")
    response = await fed.call
    fed.connection.connection_lost(ConnectionResetError("reset by peer"))
    assert await response.read_chunk() == b"ab"
    with pytest.raises(EngineError, match=r"in the middle of a response \(reset by peer\)"):
        await response.read_chunk()
    assert fed.lost == [fed.connection]
    assert fed.connection._deadline._timer is None


async def test_what_completes_a_response_while_reading_is_paused_lets_the_idle_connection_read() -> None:
    fed = Fed()
    await fed.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 100002\r\n\r\n" + bytes(100_000), b"ok")
    await fed.call
    assert fed.transport.calls == ["pause", "resume"]
    assert fed.idle == [fed.connection]


async def test_a_large_body_is_written_as_the_socket_takes_it() -> None:
    fed = Fed(body=bytes(1 << 20))
    fed.connection.pause_writing()
    await fed.feed()
    assert fed.transport.written_bytes == 0
    fed.connection.resume_writing()
    await fed.feed(OK)
    assert fed.transport.written_bytes == 1 << 20
    assert (await fed.call).status == 200
    assert fed.idle == [fed.connection]


async def test_a_connection_whose_request_was_not_sent_whole_is_not_reused() -> None:
    fed = Fed(body=bytes(1 << 20))
    fed.connection.pause_writing()
    await fed.feed(OK)
    response = await fed.call
    assert (response.status, await response.read()) == (200, b"ok")
    assert fed.transport.written_bytes == 0
    assert fed.transport.closed
    assert fed.idle == []
