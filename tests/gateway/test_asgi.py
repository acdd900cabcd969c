from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from plait.backends.errors import CallerError, LimitError, MethodNotAllowedError, NoEngineError
from plait.gateway.asgi import (
    HIGH_WATER_BYTES,
    PART_BYTES,
    AsgiSink,
    Client,
    ClientGoneError,
    WatchedReceive,
    header,
    id_of,
    send_error,
    unless_gone,
)


def test_a_header_is_its_first_value() -> None:
    headers = [(b"a", b"1"), (b"b", b"\xe9"), (b"b", b"3")]
    assert (header(headers, b"b"), header(headers, b"c")) == ("é", None)


@pytest.mark.parametrize("given", [b"mine", b"\xe9 1", b"x" * 256])
def test_a_request_has_its_clients_id(given: bytes) -> None:
    scope = {"headers": [(b"x-request-id", given), (b"x-request-id", b"second")]}
    assert id_of(scope) == id_of(scope) == given.decode("latin-1")


@pytest.mark.parametrize("given", [b"", b"x" * 257, b"a\x00", b"a\tb", b"\x7f"])
def test_a_request_whose_id_is_none_gets_one(given: bytes) -> None:
    scope = {"headers": [(b"x-request-id", given)]}
    assert id_of(scope) == id_of(scope) != given.decode("latin-1")


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (CallerError("no", param="x"), 400, {}),
        (MethodNotAllowedError("no"), 405, {b"allow": b"POST"}),
        (NoEngineError("no", retry_after_s=1.0), 503, {b"retry-after": b"1", b"x-should-retry": b"true"}),
        (NoEngineError("no", retry_after_s=0.2), 503, {b"retry-after": b"1", b"x-should-retry": b"true"}),
        (LimitError("no", retry_after_s=1_024.0), 429, {b"retry-after": b"60"}),
        (NoEngineError("no"), 503, {b"retry-after": b"1", b"x-should-retry": b"true"}),
        (LimitError("no"), 429, {b"retry-after": b"1"}),
    ],
)
async def test_an_error_is_a_whole_response(error: CallerError, status: int, headers: dict[bytes, bytes]) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await send_error(send, error, "r1")
    start, body = sent
    length = str(len(error.body())).encode()
    always = {b"content-type": b"application/json", b"x-request-id": b"r1", b"content-length": length}
    assert (start["status"], dict(start["headers"])) == (status, always | headers)
    assert body == {"type": "http.response.body", "body": error.body()}


class Leaving:
    """A client that goes when it is told to. Its server says so (`watched`), or the application has to ask."""

    def __init__(self, *, watched: bool | None) -> None:
        self._gone = asyncio.Event()
        self._client = Client() if watched else None
        self.receive: Any = self._disconnected if watched is None else WatchedReceive(self._disconnected, self._client)

    def go(self) -> None:
        self._gone.set()
        if self._client is not None:
            self._client.gone()

    async def _disconnected(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("watched", [True, False, None])
async def test_work_ends_when_its_client_goes(watched: bool | None) -> None:
    client, ended = Leaving(watched=watched), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    task = asyncio.create_task(unless_gone(client.receive, work()))
    await settled()
    client.go()
    with pytest.raises(ClientGoneError):
        await task
    assert (ended, task.cancelling()) == ([True], 0)


@pytest.mark.parametrize("watched", [True, False, None])
async def test_work_that_ends_is_not_disturbed_by_a_client_that_goes_later(watched: bool | None) -> None:
    client = Leaving(watched=watched)

    async def answer() -> str:
        found = await unless_gone(client.receive, asyncio.sleep(0, "done"))
        client.go()
        await settled()
        return found

    assert await answer() == "done"
    assert len(asyncio.all_tasks()) == 1, "nothing goes on to wait for the client"


async def test_no_work_begins_for_a_client_that_has_gone() -> None:
    client, begun = Leaving(watched=True), []

    async def work() -> None:
        begun.append(True)

    client.go()
    with pytest.raises(ClientGoneError):
        await unless_gone(client.receive, work())
    assert not begun


@pytest.mark.parametrize("watched", [True, False, None])
async def test_a_cancellation_by_another_is_not_the_clients(watched: bool | None) -> None:
    client = Leaving(watched=watched)
    task = asyncio.create_task(unless_gone(client.receive, asyncio.Event().wait()))
    await settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_only_a_whole_answer_has_a_length() -> None:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    sink = AsgiSink(send)
    sink.start(200, [(b"a", b"b")])
    sink.end(b"all at once")
    sink.whole(404, [], b"no")
    await sink.flush()
    heads = [message["headers"] for message in sent if message["type"] == "http.response.start"]
    assert heads == [[(b"a", b"b")], [(b"content-length", b"2")]]


async def test_a_long_answer_is_held_once_while_its_client_reads_it() -> None:
    sent, body = list[Message](), bytearray(range(256)) * (3 * PART_BYTES // 256) + b"x"

    async def send(message: Message) -> None:
        sent.append(message)
        assert sum(len(one.get("body", b"")) for one in sink._messages) == len(body)

    sink = AsgiSink(send)
    sink.whole(200, [], body)
    await sink.flush()
    pieces = sent[1:]
    assert b"".join(piece["body"] for piece in pieces) == body
    assert [piece.get("more_body", False) for piece in pieces] == [True, True, True, False]
    assert all(type(piece["body"]) is bytes and len(piece["body"]) <= PART_BYTES for piece in pieces)


async def test_no_piece_of_a_stream_is_parted() -> None:
    """Whoever reads the messages gets whole events."""
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    sink = AsgiSink(send)
    sink.start(200, [])
    sink.write(bytes(PART_BYTES + 1))
    sink.end(bytes(PART_BYTES + 2))
    await sink.flush()
    assert [len(piece["body"]) for piece in sent[1:]] == [PART_BYTES + 1, PART_BYTES + 2]


async def test_a_sink_is_full_until_its_client_reads_and_nothing_is_sent_after_a_refusal() -> None:
    sent, reads, room = list[Message](), asyncio.Event(), list[bool]()

    async def send(message: Message) -> None:
        await reads.wait()
        if len(sent) == 2:
            raise CallerError("no more")
        sent.append(message)

    sink = AsgiSink(send)
    sink.on_room = lambda: room.append(sink.is_drained)
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    flushing = asyncio.create_task(sink.flush(ended))
    sink.start(200, [])
    sink.write(bytes(HIGH_WATER_BYTES + 1))
    await asyncio.sleep(0)
    assert (sink.is_full, sink.is_drained, room) == (True, False, [])
    reads.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (sink.is_full, room[-1]) == (False, True)
    sink.write(b"refused")
    sink.write(b"never sent")
    with pytest.raises(CallerError):
        await flushing
    assert (len(sent), sink.is_drained) == (2, True)
