"""Requests that are cut: whatever they were doing, their client gets a 503, an error event, or the answer it has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import LimitError
from plait.gateway.asgi import WatchedReceive
from plait.gateway.server.open_requests import OpenRequests

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
WHOLE = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}


def answering(*messages: Message, then_waits: bool = True) -> ASGIApp:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        if then_waits:
            await asyncio.Event().wait()

    return app


async def nothing() -> Any:
    await asyncio.Event().wait()


async def cut(app: ASGIApp) -> tuple[OpenRequests, list[Message]]:
    """The messages of a request that is cut once it waits."""
    requests, sent = OpenRequests(app), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/", "headers": [(b"x-request-id", b"r-1")]}
    task = asyncio.create_task(requests(scope, nothing, send))
    for _ in range(3):
        await asyncio.sleep(0)
    requests.cut()
    await task
    assert task.cancelling() == 0
    return requests, sent


async def test_a_request_without_an_answer_gets_a_503() -> None:
    requests, sent = await cut(answering())
    assert sent[0]["status"] == 503
    headers = dict(sent[0]["headers"])
    assert (headers[b"retry-after"], headers[b"x-request-id"]) == (b"1", b"r-1")
    assert b'"gateway_stopping"' in sent[1]["body"]
    assert requests.cut() == 0, "none is left"


async def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    _, sent = await cut(answering(HEAD, {"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}))
    assert sent[-1]["body"].startswith(b'data: {"error":')
    assert not sent[-1].get("more_body", False)


@pytest.mark.parametrize("messages", [[WHOLE], [WHOLE, {"type": "http.response.body", "body": b"text"}]])
async def test_an_answer_that_is_not_a_stream_stays_as_it_is(messages: list[Message]) -> None:
    assert (await cut(answering(*messages)))[1] == messages


async def test_a_client_that_takes_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.gateway.server.open_requests.LAST_WORD_S", 0.01)
    requests = OpenRequests(answering())

    async def stuck(_message: Message) -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(requests({"type": "http", "path": "/", "headers": []}, nothing, stuck))
    await asyncio.sleep(0)
    requests.cut()
    async with asyncio.timeout(1):
        await task


async def test_a_request_that_the_server_cancels_is_answered_too() -> None:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    task = asyncio.create_task(OpenRequests(answering())({"type": "http", "path": "/", "headers": []}, nothing, send))
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert task.cancelling() == 0
    assert sent[0]["status"] == 503


@pytest.mark.parametrize("messages", [[], [HEAD], [WHOLE]])
async def test_a_defect_is_answered_unless_a_whole_answer_has_begun(messages: list[Message]) -> None:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def broken(_scope: Scope, _receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        raise KeyError("a defect")

    with structlog.testing.capture_logs() as logged:
        await OpenRequests(broken)({"type": "http", "method": "GET", "path": "/", "headers": []}, nothing, send)
    assert [line["event"] for line in logged] == ["defect"]
    told = b"".join(message.get("body", b"") for message in sent)
    assert (b'"internal_error"' in told) == (messages != [WHOLE])


async def test_what_goes_wrong_behind_the_first_byte_ends_the_stream() -> None:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def refusing(_scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(receive, WatchedReceive)
        assert not receive.has_answer
        await send(HEAD)
        assert receive.has_answer
        raise LimitError("no more")

    with structlog.testing.capture_logs() as logged:
        await OpenRequests(refusing)({"type": "http", "method": "POST", "path": "/", "headers": []}, nothing, send)
    assert [(line["event"], line["status"]) for line in logged] == [("refused", 429)]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["body"].startswith(b'data: {"error":')


async def test_while_stopping_each_answer_closes_its_connection() -> None:
    requests, sent = OpenRequests(answering(WHOLE, {"type": "http.response.body", "body": b""}, then_waits=False)), []

    async def send(message: Message) -> None:
        sent.append(message)

    for stopping in (False, True):
        requests.stopping = stopping
        await requests({"type": "http", "path": "/", "headers": []}, nothing, send)
    assert [(b"connection", b"close") in message["headers"] for message in sent[::2]] == [False, True]
