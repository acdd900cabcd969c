"""The sink of Plait's own server: what is written to it is HTTP, and goes out no faster than its client reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.asgi import PART_BYTES
from plait.gateway.server.served_client import JOINED_BYTES, LONG_BYTES
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
    assert (made.answered, made.cycle.response_complete, made.transport.closed) == (1, True, False)


def test_the_answer_to_a_head_has_no_body() -> None:
    made = FakeConnection()
    made.cycle.scope["method"] = "HEAD"
    made.client.whole(405, JSON, b'{"error": 1}')
    assert made.transport.written[0].endswith(b"content-length: 12\r\n\r\n")
    assert made.answered == 1


@given(st.lists(st.binary(max_size=20)), st.binary(max_size=20))
def test_the_pieces_of_a_stream_are_chunks(pieces: list[bytes], last: bytes) -> None:
    made = FakeConnection()
    made.client.start(200, JSON)
    for piece in pieces:
        made.client.write(piece)
    assert not made.cycle.response_complete
    made.client.end(last)
    answer = read(made)
    assert (answer.body, answer.has_ended, made.answered) == (b"".join(pieces) + last, True, 1)
    assert b"content-length" not in dict(answer.headers), "whoever changes it on the way would have to know"


@pytest.mark.parametrize(("keep_alive", "stopping"), [(False, False), (True, True)])
def test_the_last_answer_of_a_connection_says_so_and_closes_it(keep_alive: bool, stopping: bool) -> None:
    made = FakeConnection(keep_alive=keep_alive)
    made.client.requests = SimpleNamespace(stopping=stopping)
    made.client.whole(200, JSON, b"{}")
    assert (b"connection", b"close") in read(made).headers
    assert made.transport.closed


def test_a_connection_whose_request_is_still_coming_closes_after_it() -> None:
    """Closed at once, the system would discard the answer with what has not been read."""
    made = FakeConnection(keep_alive=False)
    made.cycle.more_body = True
    made.client.whole(413, JSON, b"{}")
    assert (made.closes_later, made.transport.closed, made.answered) == (True, False, 1)


def test_a_header_with_a_newline_is_never_written() -> None:
    made = FakeConnection()
    with pytest.raises(ValueError, match="newline"):
        made.client.start(200, [(b"x-a", b"1\r\nx-b: 2")])
    assert (made.transport.written, made.cycle.response_started) == ([], False)


def test_a_long_answer_goes_out_as_its_client_reads() -> None:
    made, answer, room = FakeConnection(), bytes(3 * PART_BYTES), list[bool]()
    made.client.on_room = lambda: room.append(made.client.is_drained)
    made.pause()
    made.client.whole(200, JSON, answer)
    assert (made.client.is_full, made.client.is_drained, made.answered) == (True, False, 0)
    assert sum(map(len, made.transport.written)) < JOINED_BYTES
    made.resume()
    assert (read(made).body, made.answered, room) == (answer, 1, [True])


def test_nothing_is_written_to_a_client_that_has_gone() -> None:
    made = FakeConnection()
    made.client.start(200, JSON)
    made.client.write(b"one")
    made.transport.close()
    made.client.write(b"two")
    made.client.end(b"three")
    assert read(made).body == b"one"
    assert not made.cycle.response_complete


@given(st.binary(max_size=30))
def test_a_body_that_was_given_back_is_received(body: bytes) -> None:
    assert FakeConnection(body + bytes(LONG_BYTES + 1)).client.take_body() is None
    made = FakeConnection(body)
    assert made.client.take_body() == body
    made.client.give_back(body)
    assert bytes(made.cycle.body) == body
    assert made.cycle.message_event.is_set()


def test_a_body_that_has_not_all_come_is_not_taken() -> None:
    made = FakeConnection(b"half")
    made.cycle.more_body = True
    assert made.client.take_body() is None
