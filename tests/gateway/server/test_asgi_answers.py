"""Answers by ASGI's messages: how often each is written to its connection, how it is framed, and what is a defect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from plait.gateway.server.served_request import JOINED_BYTES, Stage
from tests.gateway.server.fake_connection import FakeConnection, Read


def start(*headers: tuple[bytes, bytes], status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(content: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


LENGTH = (b"Content-Length", b"4")


async def sent(*messages: Message, **options: Any) -> FakeConnection:
    """A connection to which these messages were sent, in one turn of the event loop."""
    made = FakeConnection(**options)
    for message in messages:
        await made.client.send(message)
    return made


async def test_a_head_goes_out_with_the_first_bytes() -> None:
    made = await sent(start(LENGTH), body(b"on", more=True), body(b"e!"))
    await asyncio.sleep(0)
    assert [written[-4:] for written in made.transport.written] == [b"\r\non", b"e!"]


async def test_a_head_alone_does_not_wait() -> None:
    made = await sent(start(LENGTH))
    assert made.transport.written == []
    await asyncio.sleep(0)
    assert [written[-4:] for written in made.transport.written] == [b"\r\n\r\n"]
    await made.client.send(body(b"body"))
    assert made.transport.written[1:] == [b"body"]


@pytest.mark.parametrize("length", [(), ((b"content-length", b"%d" % (JOINED_BYTES + 1)),)], ids=["chunks", "length"])
async def test_long_bytes_are_whole(length: tuple[tuple[bytes, bytes], ...]) -> None:
    content = bytes(JOINED_BYTES + 1)
    made = await sent(start(*length), body(content))
    assert Read(b"".join(made.transport.written)).body == content


async def test_a_head_is_not_written_to_a_connection_that_has_closed_since() -> None:
    made = await sent(start())
    made.transport.close()
    await asyncio.sleep(0)
    assert made.transport.written == []


async def test_nothing_is_written_to_who_has_gone() -> None:
    made = await sent(start(LENGTH), body(b"on", more=True))
    made.client.gone()
    await made.client.send(body(b"e!"))
    assert len(made.transport.written) == 1
    assert await made.client.receive() == {"type": "http.disconnect"}


async def test_the_next_piece_waits_until_the_client_has_room() -> None:
    made = await sent(start(), body(b"one", more=True))
    made.pause()
    sending = asyncio.create_task(made.client.send(body(b"two")))
    await asyncio.sleep(0.01)
    assert not sending.done()
    made.resume()
    await sending
    assert Read(b"".join(made.transport.written)).body == b"onetwo"


@pytest.mark.parametrize(
    ("method", "status", "headers", "version", "framed", "content"),
    [
        ("GET", 200, [], "1.1", b"transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n", b"body"),
        ("GET", 200, [(b"Transfer-Encoding", b"chunked")], "1.1", b"4\r\nbody\r\n0\r\n\r\n", b"body"),
        ("GET", 200, [], "1.0", b"connection: close\r\n\r\nbody", b"body"),
        ("GET", 200, [LENGTH], "1.1", b"content-length: 4\r\n\r\nbody", b"body"),
        ("HEAD", 200, [LENGTH], "1.1", b"content-length: 4\r\n\r\n", b""),
        ("HEAD", 200, [LENGTH], "1.1", b"content-length: 4\r\n\r\n", b"body"),
        ("HEAD", 200, [], "1.1", b"date: today\r\n\r\n", b"body"),
        ("GET", 204, [], "1.1", b"date: today\r\n\r\n", b""),
        ("GET", 304, [(b"etag", b"a")], "1.1", b"etag: a\r\n\r\n", b""),
        ("GET", 200, [LENGTH, (b"Connection", b"close")], "1.1", b"connection: close\r\n\r\nbody", b"body"),
    ],
)  # fmt: skip
async def test_an_answer_is_framed_by_what_is_known_of_it(  # noqa: PLR0917 - a table
    method: str, status: int, headers: list[tuple[bytes, bytes]], version: str, framed: bytes, content: bytes
) -> None:
    made = await sent(start(*headers, status=status), body(content), method=method, version=version)
    written = b"".join(made.transport.written)
    assert written.endswith(framed)
    assert written.count(b"connection: ") <= 1
    assert written.lower().count(b"transfer-encoding: ") == (b"chunked" in written)
    assert (made.client.stage, made.answered) == (Stage.COMPLETE, 1)
    assert made.client.keep_alive == (b"connection: close" not in written)


DEFECTS: dict[str, list[Message]] = {
    "a body without a head": [body(b"body")],
    "two heads": [start(), start()],
    "something behind the end": [start(LENGTH), body(b"body"), body(b"more")],
    "more than the length": [start(LENGTH), body(b"bodies")],
    "less than the length": [start(LENGTH), body(b"bod")],
    "more than the length, in pieces": [start(LENGTH), body(b"bod", more=True), body(b"ies")],
    "a name with a space": [start((b"a b", b"c"))],
    "a name with a colon": [start((b"a:", b"c"))],
    "no name": [start((b"", b"c"))],
    "a value with a newline": [start((b"a", b"b\r\nc: d"))],
    "a value with a NUL": [start((b"a", b"b\0"))],
}


@pytest.mark.parametrize("messages", DEFECTS.values(), ids=DEFECTS)
async def test_an_application_is_told_of_its_defect(messages: list[Message]) -> None:
    *first, last = messages
    made = await sent(*first)
    written = list(made.transport.written)
    with pytest.raises((RuntimeError, ValueError)):
        await made.client.send(last)
    assert made.transport.written == written


async def test_bodies_are_received_as_they_come() -> None:
    made = FakeConnection()
    made.client.more_body = True
    made.client.add(b"one")
    made.client.add(b"two")
    assert await made.client.receive() == {"type": "http.request", "body": b"onetwo", "more_body": True}
    waiting = [asyncio.create_task(made.client.receive()) for _ in range(2)]
    await asyncio.sleep(0)
    made.client.end_body()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False], "the second waits for the client to go"
    assert waiting[0].result() == {"type": "http.request", "body": b"", "more_body": False}
    made.client.gone()
    assert await waiting[1] == {"type": "http.disconnect"}


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_body_is_asked_for_once(version: str) -> None:
    made = FakeConnection(version=version)
    made.client.scope["headers"] = [(b"expect", b"100-Continue")]
    made.client.more_body = True
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.client.receive(), 0.01)
    assert len(made.transport.written) == (version == "1.1"), "HTTP/1.0 has no interim answers"
