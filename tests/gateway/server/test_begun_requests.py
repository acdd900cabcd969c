"""Requests that are begun without a task: however they end or are cut, their client gets an answer, once."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from plait.gateway.asgi import OnEnd, id_of, sink_of
from plait.gateway.server.open_requests import OpenRequests
from plait.gateway.server.served_request import ServedReceive
from tests.gateway.server.fake_connection import FakeConnection, Read

NAMED = [(b"x-request-id", b"r-1")]
STREAM = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]


class Begun:
    """An application that begins each request, or none, and does no more until the test does."""

    def __init__(self, *, takes: bool = True, defect: Exception | None = None, breaks_at: int = 0) -> None:
        self.cancelled = 0
        self._breaks_at = breaks_at
        self.on_end: OnEnd | None = None
        self._takes = takes
        self._defect = defect

    def begin(self, _scope: Any, _body: bytes, _client: Any, on_end: OnEnd, _in_task: object) -> Begun | None:
        if self._defect is not None:
            raise self._defect
        self.on_end = on_end
        return self if self._takes else None

    def cancel(self) -> None:
        self.cancelled += 1
        if self.cancelled == self._breaks_at:
            raise RuntimeError("a defect")

    async def __call__(self, _scope: Any, _receive: Any, _send: Any) -> None:
        """Is not called here."""


def begun(**options: Any) -> tuple[Begun, OpenRequests, FakeConnection]:
    app, made = Begun(**options), FakeConnection(headers=NAMED)
    requests = OpenRequests(app)
    assert requests.begin(made.client) == options.get("takes", True)
    return app, requests, made


def read(made: FakeConnection) -> Read:
    return Read(b"".join(made.transport.written))


def test_one_that_is_cut_without_an_answer_gets_a_503() -> None:
    app, requests, made = begun()
    assert requests.cut() == 1
    answer = read(made)
    assert (answer.status, answer.has_ended, app.cancelled) == (503, True, 1)
    assert (b"x-request-id", b"r-1") in answer.headers
    assert b'"gateway_stopping"' in answer.body
    assert requests.cut() == 0


def test_a_stream_that_is_cut_ends_with_an_error_event() -> None:
    _, requests, made = begun()
    made.client.start(200, STREAM)
    made.client.write(b"data: 1\n\n")
    requests.cut()
    answer = read(made)
    assert answer.has_ended
    assert answer.body.startswith(b'data: 1\n\ndata: {"error"')


def test_the_connection_of_a_long_answer_that_is_cut_is_closed() -> None:
    _, requests, made = begun()
    made.pause()
    made.client.whole(200, JSON, bytes(2**20))
    requests.cut()
    assert made.transport.closed
    assert not read(made).has_ended


def test_one_that_has_ended_is_not_cut() -> None:
    app, requests, made = begun()
    assert app.on_end is not None
    app.on_end(None)
    assert (requests.cut(), app.cancelled, made.transport.written) == (0, 0, [])


async def test_one_that_is_not_taken_leaves_nothing() -> None:
    made, requests = FakeConnection(b"a body"), OpenRequests(Begun(takes=False))
    assert not requests.begin(made.client)
    assert (requests.cut(), made.transport.written) == (0, [])
    assert (await made.client.receive())["body"] == b"a body", "it is received as ASGI has it"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_defect_is_logged_and_answered(is_late: bool) -> None:
    defect = RuntimeError("a defect")
    with structlog.testing.capture_logs() as lines:
        app, requests, made = begun(**({} if is_late else {"defect": defect}))
        if is_late:
            assert app.on_end is not None
            app.on_end(defect)
    assert [(line["event"], line["request_id"], line["exc_info"]) for line in lines] == [("defect", "r-1", defect)]
    answer = read(made)
    assert (answer.status, requests.cut()) == (500, 0)
    assert b"internal_error" in answer.body


def test_a_request_without_a_name_has_one_in_the_log_and_in_its_answer() -> None:
    app, made = Begun(defect=RuntimeError("a defect")), FakeConnection()
    with structlog.testing.capture_logs() as lines:
        assert OpenRequests(app).begin(made.client)
    name, answer = lines[0]["request_id"].encode(), read(made)
    assert (b"x-request-id", name) in answer.headers
    assert name in answer.body
    assert id_of(made.client.scope).encode() == name


def test_a_call_that_cannot_be_cancelled_keeps_no_other_from_its_end() -> None:
    app, made = Begun(breaks_at=1), [FakeConnection() for _ in range(3)]
    requests = OpenRequests(app)
    for one in made:
        assert requests.begin(one.client)
    with structlog.testing.capture_logs() as lines:
        assert requests.cut() == 3
    assert [read(one).status for one in made] == [503] * 3
    assert (app.cancelled, lines[0]["event"]) == (3, "defect")


@pytest.mark.parametrize("is_changed", [False, True])
async def test_only_who_sends_to_the_server_itself_may_write_to_its_connection(is_changed: bool) -> None:
    sinks, made = list[Any](), FakeConnection()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        sinks.append(sink_of(receive, send))

    async def changed(_message: Any) -> None:
        """As a middleware that adds headers."""

    receive, send = ServedReceive(made.client.receive, made.client), changed if is_changed else made.client.send
    await OpenRequests(app)(made.client.scope, receive, send)
    assert (sinks == [made.client]) == (not is_changed)


def test_while_stopping_the_answer_is_the_last_of_its_connection() -> None:
    _, requests, made = begun()
    requests.stopping = True
    made.client.whole(200, JSON, b"{}")
    assert (b"connection", b"close") in read(made).headers
