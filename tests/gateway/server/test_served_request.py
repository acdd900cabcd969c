"""The sink of Plait's own server: what is written to it is HTTP, and goes out no faster than its client reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.asgi import PART_BYTES
from plait.gateway.server.served_request import JOINED_BYTES, LONG_BYTES, Stage
from tests.gateway.server.fake_connection import FakeConnection, Read

JSON = [(b"content-type", b"application/json")]


def read(made: FakeConnection) -> Read:
    return Read(b"".join(made.transport.written))


def test_a_whole_answer_is_one_write_with_its_length() -> None:
    made = FakeConnection()
    made.client.whole(200, JSON, b'{"a": 1}')
    (written,) = made.transport.written
    answer = Read(written)
    assert (answer.status, answer.body, answer.has_ended) == (200, b'{"a": 1}', True)
    assert answer.headers == [(b"date", b"today"), *JSON, (b"content-length", b"8")]
    assert (made.answered, made.client.stage) == (1, Stage.COMPLETE)


def test_the_answer_to_a_head_has_no_body() -> None:
    made = FakeConnection(method="HEAD")
    made.client.whole(405, JSON, b'{"error": 1}')
    assert made.transport.written[0].endswith(b"content-length: 12\r\n\r\n")
    assert made.answered == 1


@given(st.lists(st.binary(max_size=20)), st.binary(max_size=20))
def test_the_pieces_of_a_stream_are_chunks(pieces: list[bytes], last: bytes) -> None:
    made = FakeConnection()
    made.client.start(200, JSON)
    for piece in pieces:
        made.client.write(piece)
    assert made.client.stage is Stage.ANSWERING
    made.client.end(last)
    answer = read(made)
    assert (answer.body, answer.has_ended, made.answered) == (b"".join(pieces) + last, True, 1)
    assert b"content-length" not in dict(answer.headers), "whoever changes it on the way would have to know"


@pytest.mark.parametrize(("keep_alive", "stopping"), [(False, False), (True, True)])
def test_the_last_answer_of_a_connection_says_so(keep_alive: bool, stopping: bool) -> None:
    made = FakeConnection(keep_alive=keep_alive)
    made.client.requests = SimpleNamespace(stopping=stopping)
    made.client.whole(200, JSON, b"{}")
    assert (b"connection", b"close") in read(made).headers
    assert not made.client.keep_alive


def test_a_header_with_a_newline_is_never_written() -> None:
    made = FakeConnection()
    with pytest.raises(ValueError, match="newline"):
        made.client.start(200, [(b"x-a", b"1\r\nx-b: 2")])
    assert (made.transport.written, made.client.answer_headers) == ([], None)


def test_a_long_answer_goes_out_as_its_client_reads() -> None:
    made, answer, room = FakeConnection(), bytes(3 * PART_BYTES), list[bool]()
    made.client.on_room = lambda: room.append(made.client.is_drained)
    made.pause()
    made.client.whole(200, JSON, answer)
    assert (made.client.is_full, made.client.is_drained, made.answered) == (True, False, 0)
    assert sum(map(len, made.transport.written)) < JOINED_BYTES
    made.resume()
    assert (read(made).body, made.answered, room) == (answer, 1, [True])


def test_the_end_of_a_long_answer_is_told_though_its_client_has_still_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece fills the transport, the last one too; the connection then tells the next request of room."""
    made, room = FakeConnection(), list[bool]()
    write = made.transport.write

    def fills(data: bytes | bytearray | memoryview) -> None:
        write(data)
        made.pause()

    monkeypatch.setattr(made.transport, "write", fills)
    made.client.on_room = lambda: room.append(made.client.is_drained)
    made.client.whole(200, JSON, bytes(2 * PART_BYTES))
    while made.client.stage is not Stage.COMPLETE:
        made.resume()
    assert (made.answered, room) == (1, [True])


def test_nothing_is_written_to_a_client_that_has_gone() -> None:
    made = FakeConnection()
    made.client.start(200, JSON)
    made.client.write(b"one")
    made.transport.close()
    made.client.write(b"two")
    made.client.end(b"three")
    assert read(made).body == b"one"
    assert made.client.stage is Stage.ANSWERING


@given(st.binary(max_size=30))
async def test_a_body_that_was_given_back_is_received(body: bytes) -> None:
    assert FakeConnection(body + bytes(LONG_BYTES + 1)).client.take_body() is None
    made = FakeConnection(body)
    assert made.client.take_body() == body
    made.client.give_back(body)
    assert await made.client.receive() == {"type": "http.request", "body": body, "more_body": False}


def test_a_body_that_has_not_all_come_is_not_taken() -> None:
    made = FakeConnection(b"half")
    made.client.more_body = True
    assert made.client.take_body() is None
