"""Requests that are cut: whatever they were doing, their client gets a 503, an error event, or the answer it has."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import LimitError
from plait.gateway.asgi import WatchedReceive
from plait.gateway.server.open_requests import OpenRequests
from plait.gateway.server.served_request import ServedReceive, Stage
from tests.gateway.server.fake_connection import FakeConnection, Read
from tests.gateway.server.serving import GET, serving
from tests.waiting import WITHIN_S

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
WHOLE = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}
TEXT = {"type": "http.response.body", "body": b"text"}


def answering(*messages: Message, then_waits: bool = True) -> ASGIApp:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        if then_waits:
            await asyncio.Event().wait()

    return app


def connected() -> FakeConnection:
    return FakeConnection(headers=[(b"x-request-id", b"r-1")])


async def served(requests: OpenRequests, made: FakeConnection, send: Send | None = None) -> None:
    await requests(made.client.scope, ServedReceive(made.client.receive, made.client), send or made.client.send)


def read(made: FakeConnection) -> Read:
    return Read(b"".join(made.transport.written))


async def cut(app: ASGIApp) -> tuple[OpenRequests, FakeConnection]:
    """The connection of a request that is cut once it waits."""
    requests, made = OpenRequests(app), connected()
    task = asyncio.create_task(served(requests, made))
    for _ in range(3):
        await asyncio.sleep(0)
    requests.cut()
    await task
    assert task.cancelling() == 0
    return requests, made


async def test_a_request_without_an_answer_gets_a_503() -> None:
    requests, made = await cut(answering())
    answer = read(made)
    assert (answer.status, answer.has_ended) == (503, True)
    headers = dict(answer.headers)
    assert (headers[b"retry-after"], headers[b"x-request-id"]) == (b"1", b"r-1")
    assert b'"gateway_stopping"' in answer.body
    assert requests.cut() == 0, "none is left"


async def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    _, made = await cut(answering(HEAD, {"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}))
    answer = read(made)
    assert answer.body.startswith(b'data: x\n\ndata: {"error":')
    assert answer.has_ended


@pytest.mark.parametrize("messages", [[WHOLE], [WHOLE, TEXT]])
async def test_an_answer_that_is_not_a_stream_stays_as_it_is(messages: list[Message]) -> None:
    answer = read((await cut(answering(*messages)))[1])
    assert (answer.status, answer.body, answer.has_ended) == (200, *((b"text", True) if messages[1:] else (b"", False)))


async def test_a_client_that_takes_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.gateway.server.open_requests.LAST_WORD_S", 0.01)
    requests = OpenRequests(answering())

    async def stuck(_message: Message) -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(served(requests, connected(), stuck))
    await asyncio.sleep(0)
    requests.cut()
    async with asyncio.timeout(WITHIN_S):
        await task


async def test_a_request_that_the_server_cancels_is_answered_too() -> None:
    made = connected()
    task = asyncio.create_task(served(OpenRequests(answering()), made))
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert task.cancelling() == 0
    assert read(made).status == 503


@pytest.mark.parametrize("messages", [[], [HEAD], [WHOLE]])
async def test_a_defect_is_answered_unless_a_whole_answer_has_begun(messages: list[Message]) -> None:
    async def broken(_scope: Scope, _receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        raise KeyError("a defect")

    made = connected()
    with structlog.testing.capture_logs() as logged:
        await served(OpenRequests(broken), made)
    assert [(line["event"], type(line["exc_info"])) for line in logged] == [("defect", KeyError)]
    assert (b'"internal_error"' in b"".join(made.transport.written)) == (messages != [WHOLE])
    assert made.transport.closed == (messages == [WHOLE])


async def test_a_defect_is_answered_on_the_way_of_the_answer() -> None:
    """So a middleware outside, as for CORS, can add its headers."""
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def broken(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise KeyError("a defect")

    with structlog.testing.capture_logs():
        await served(OpenRequests(broken), connected(), send)
    assert [message.get("status") for message in sent] == [500, None]


async def test_an_application_that_does_not_answer_has_a_defect() -> None:
    made = connected()
    with structlog.testing.capture_logs() as logged:
        await served(OpenRequests(answering(then_waits=False)), made)
    assert [line["event"] for line in logged] == ["defect"]
    assert read(made).status == 500


async def test_whose_client_has_gone_need_not_be_answered() -> None:
    made = connected()
    made.client.gone()
    with structlog.testing.capture_logs() as logged:
        await served(OpenRequests(answering(then_waits=False)), made)
    assert (logged, made.transport.written) == ([], [])


async def test_a_whole_answer_for_a_connection_that_closes_is_an_answer() -> None:
    """The client has closed its side, and the event loop tells so in a moment."""

    answered = asyncio.Event()

    async def late(_scope: Scope, receive: Receive, _send: Send) -> None:
        assert isinstance(receive, ServedReceive)
        while not receive.client.line.transport.is_closing():  # noqa: ASYNC110 - the moment itself
            await asyncio.sleep(0)
        assert not receive.client.is_gone
        receive.client.whole(200, [], b"late")
        answered.set()

    with structlog.testing.capture_logs() as logged:
        async with serving(application=late) as running:
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(GET + b"\r\n")
            writer.close()
            async with asyncio.timeout(WITHIN_S):
                await answered.wait()
    assert logged == []


async def test_what_goes_wrong_behind_the_first_byte_ends_the_stream() -> None:
    async def refusing(_scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(receive, WatchedReceive)
        assert not receive.has_answer
        await send(HEAD)
        assert receive.has_answer
        raise LimitError("no more")

    made, refused = connected(), list[int]()
    await served(OpenRequests(refusing, lambda _scope, error: refused.append(error.status)), made)
    assert refused == [429]
    assert read(made).has_ended
    assert read(made).body.startswith(b'data: {"error":')


async def test_while_stopping_each_answer_closes_its_connection() -> None:
    requests = OpenRequests(answering(WHOLE, TEXT, then_waits=False))
    for stopping in (False, True):
        requests.stopping = stopping
        made = connected()
        await served(requests, made)
        assert made.client.stage is Stage.COMPLETE
        assert ((b"connection", b"close") in read(made).headers, made.client.keep_alive) == (stopping, not stopping)


async def test_the_requests_of_another_server_are_passed_on() -> None:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await OpenRequests(answering(WHOLE, TEXT, then_waits=False))({"type": "http", "path": "/"}, receive, send)
    assert sent == [WHOLE, TEXT]
