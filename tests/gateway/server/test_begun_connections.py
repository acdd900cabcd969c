"""Requests that are begun without a task, over the real server and sockets."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from plait.gateway.asgi import OnEnd
from plait.gateway.server.served_request import ServedRequest
from tests.gateway.server.serving import app, serving
from tests.waiting import WITHIN_S


class Begins:
    """Begins each request that is whole, and answers with its body, as often as the path says. `app` answers others."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = asyncio.Event()

    def begin(self, scope: Scope, body: bytes, client: ServedRequest, on_end: OnEnd, _in_task: object) -> Begins | None:
        self.begun += 1
        if scope["path"] == "/waits":
            client.on_gone = self.cancelled.set
            return self
        client.whole(200, [], body * int(scope["path"][1:]))
        on_end(None)
        return self

    def cancel(self) -> None:
        self.cancelled.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)


def posted(path: bytes, body: bytes, *headers: bytes) -> bytes:
    head = [b"POST %s HTTP/1.1" % path, b"Host: a", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", body])


LAST = b"Connection: close"


@pytest.mark.parametrize("cut", [0, 20, -3])
async def test_a_short_request_is_begun_however_it_comes(cut: int) -> None:
    begins, request = Begins(), posted(b"/1", b"hello", LAST)
    pieces = (request[:cut], request[cut:]) if cut else (request,)
    async with serving(application=begins) as running:
        answer = await running.ask(*pieces, pause_s=0.02)
    assert (answer.split()[1], answer[-5:], begins.begun) == (b"200", b"hello", 1)


@pytest.mark.parametrize("body", [b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhello\r\n", b""])
async def test_one_whose_length_is_not_known_is_served_in_any_case(body: bytes) -> None:
    begins, head = Begins(), b"POST /1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    whole = b"5\r\nhello\r\n0\r\n\r\n"
    async with serving(application=begins) as running:
        answer = await running.ask(head + body, whole[len(body) :], pause_s=0.05)
    assert (answer.split()[1], answer[-5:]) == (b"200", b"hello")


async def test_requests_in_a_row_are_answered_in_their_order() -> None:
    begins, bodies = Begins(), [b"%05d" % n for n in range(9)]
    requests = [posted(b"/1", body) for body in bodies[:-1]] + [posted(b"/1", bodies[-1], LAST)]
    async with serving(application=begins) as running:
        answer = await running.ask(b"".join(requests))
    assert [head[:5] for head in answer.split(b"\r\n\r\n")[1:]] == bodies
    assert begins.begun == 9


async def test_a_long_answer_waits_for_its_client() -> None:
    begins = Begins()
    async with serving(application=begins) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=2**12)
        writer.write(posted(b"/2000", bytes(5_000), LAST))
        await asyncio.sleep(0.1)
        answer = await asyncio.wait_for(reader.read(), WITHIN_S)
        writer.close()
    assert answer.endswith(b"\r\n\r\n" + bytes(10_000_000))


async def test_what_is_begun_is_told_that_its_client_has_gone() -> None:
    begins = Begins()
    async with serving(application=begins) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(posted(b"/waits", b"hello"))
        await asyncio.sleep(0.05)
        assert not begins.cancelled.is_set()
        writer.close()
        await asyncio.wait_for(begins.cancelled.wait(), WITHIN_S)
