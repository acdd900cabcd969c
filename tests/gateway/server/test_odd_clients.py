"""What odd requests, and clients that leave, come to: a connection over a fake transport."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from starlette.types import Message, Receive, Scope, Send

from plait.gateway.asgi import send_whole
from plait.gateway.server.connection import ClientBounds, Connection
from plait.gateway.server.open_requests import OpenRequests
from tests.gateway.server.fake_connection import FakeTransport

HOST = b" HTTP/1.1\r\nHost: a\r\n"
GET = b"GET /" + HOST
POST = b"POST /" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@dataclass
class Server:
    """What a server shares among its connections, and the requests that its application has got."""

    connections: set[Any] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    default_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An application: it answers with the body, or as the path says."""
        self.scopes.append(scope)
        if scope["path"] == "/unread":
            await send_whole(send, 200, [], b"unread")
            return
        message = await receive()
        self.received.append(message)
        body = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            self.received.append(message)
            body += message.get("body", b"")
        if scope["path"] == "/wait":
            self.received.append(await receive())
        elif scope["path"] in {"/longer", "/shorter"}:
            length = (b"content-length", b"%d" % (len(body) - 1 if scope["path"] == "/longer" else len(body) + 1))
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            await send({"type": "http.response.body", "body": body})
        elif message["type"] != "http.disconnect":
            await send_whole(send, 200, [], body)


class Client:
    """A client on its connection to a server."""

    def __init__(self, server: Server | None = None) -> None:
        self.server = server or Server()
        self.transport = FakeTransport()
        self.connection = Connection(OpenRequests(self.server), ClientBounds(), self.server, {"from": "lifespan"})
        self.connection.connection_made(self.transport)

    async def sends(self, *pieces: bytes) -> bytes:
        """Send; returns all that has been answered by the time nothing more happens."""
        for piece in pieces:
            self.connection.data_received(piece)
            await self.turns()
        return self.answered

    async def leaves(self) -> None:
        """The connection is lost."""
        self.connection.connection_lost(None)
        await self.turns()

    async def turns(self) -> None:
        for _ in range(9):
            await asyncio.sleep(0)

    @property
    def answered(self) -> bytes:
        return b"".join(self.transport.written)

    @property
    def statuses(self) -> list[int]:
        return [int(answer.split()[0]) for answer in self.answered.split(b"HTTP/1.1 ")[1:]]


TOLD = [
    GET + b"a: b\0c\r\n\r\n",
    GET + b"a: b\r\n c\r\n\r\n",  # a folded line
    GET + b"a : b\r\n\r\n",
    GET + b": b\r\n\r\n",
    GET + b"nothing\r\n\r\n",
    GET + b"\xff: b\r\n\r\n",
    b"GET / HTTP/1.1\nHost: a\n\n",
    GET + b"a: b\n\r\n",
    GET + b"a: b\r\r\n\r\n",
    b"GET /a b" + HOST + b"\r\n",
    b"GET /caf\xc3\xa9" + HOST + b"\r\n",
    b"FETCH /" + HOST + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT a:443" + HOST + b"\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    POST + b"Content-Length: 5, 5\r\n\r\nhello",
    POST + b"Content-Length: +5\r\n\r\nhello",
    POST + b"Content-Length: -1\r\n\r\nhello",
    POST + b"Content-Length: 99999999999999999999999\r\n\r\nhello",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    CHUNKED + b"5\nhello\r\n0\r\n\r\n",
    CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"ffffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"5\r\nhelloXX0\r\n\r\n",
]  # fmt: skip
"""What other servers may read in another way, so that a request could be hidden behind it."""


@pytest.mark.parametrize("is_parted", [False, True])
@pytest.mark.parametrize("request_bytes", TOLD, ids=repr)
async def test_what_is_not_strictly_http_is_refused_and_nothing_behind_it_is_read(
    request_bytes: bytes, is_parted: bool
) -> None:
    client = Client()
    hidden = request_bytes + b"GET /hidden" + HOST + b"\r\n"
    answer = await client.sends(*([hidden[at : at + 1] for at in range(len(hidden))] if is_parted else [hidden]))
    assert client.statuses == [400]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert not [scope for scope in client.server.scopes if scope["path"] == "/hidden"]
    assert client.transport.closed


@pytest.mark.parametrize(
    ("target", "path", "raw_path", "query"),
    [
        (b"/a/b?c=d&e=%20", "/a/b", b"/a/b", b"c=d&e=%20"),
        (b"/a%20b%2Fc", "/a b/c", b"/a%20b%2Fc", b""),
        (b"/caf%C3%A9", "/caf\u00e9", b"/caf%C3%A9", b""),
        (b"/%ff", "/\ufffd", b"/%ff", b""),
        (b"/%zz", "/%zz", b"/%zz", b""),
        (b"/a?", "/a", b"/a", b""),
        (b"/a?b?c", "/a", b"/a", b"b?c"),
        (b"//a//b", "//a//b", b"//a//b", b""),
        (b"/../a", "/../a", b"/../a", b""),
        (b"/a#b", "/a", b"/a", b""),
        (b"http://b/c?d", "/c", b"/c", b"d"),
        (b"http://b", "/", b"/", b""),
        (b"*", "*", b"*", b""),
    ],
)
async def test_a_target_becomes_path_and_query(target: bytes, path: str, raw_path: bytes, query: bytes) -> None:
    client = Client()
    await client.sends(b"OPTIONS " + target + HOST + b"X-Name: Value\r\n\r\n")
    assert client.statuses == [200]
    (scope,) = client.server.scopes
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == (path, raw_path, query)
    assert (scope["type"], scope["method"], scope["http_version"], scope["scheme"], scope["root_path"]) == (
        "http", "OPTIONS", "1.1", "http", "",
    )  # fmt: skip
    assert scope["headers"] == [(b"host", b"a"), (b"x-name", b"Value")]
    assert (scope["client"], scope["server"]) == (("127.0.0.1", 5), ("::1", 80))
    scope["state"]["of"] = "this request"
    await client.sends(GET + b"\r\n")
    assert client.server.scopes[1]["state"] == {"from": "lifespan"}


@pytest.mark.parametrize("target", [b"/" + b"a" * 70_000, b"/?" + b"a" * 70_000])
async def test_a_target_that_is_too_long_is_told(target: bytes) -> None:
    client = Client()
    await client.sends(b"GET " + target + HOST + b"\r\n")
    assert (client.statuses, client.transport.closed) == ([431], True)


async def test_a_head_may_come_in_any_pieces() -> None:
    client, request = Client(), POST + b"Content-Length: 5\r\n\r\nhello"
    answer = await client.sends(*[request[at : at + 1] for at in range(len(request))])
    assert answer.endswith(b"\r\n\r\nhello")


async def test_nothing_is_answered_behind_the_last_request() -> None:
    client = Client()
    await client.sends(GET + b"Connection: close\r\n\r\n" + GET + b"\r\n")
    assert (client.statuses, client.transport.closed) == ([200], True)


async def test_a_client_that_has_gone_is_told_to_who_waits() -> None:
    client = Client()
    await client.sends(b"GET /wait" + HOST + b"\r\n")
    assert client.server.tasks
    await client.leaves()
    assert client.server.received[-1] == {"type": "http.disconnect"}
    assert (client.server.tasks, client.server.connections, client.answered) == (set(), set(), b"")


async def test_a_client_may_go_in_the_middle_of_a_body() -> None:
    client = Client()
    with structlog.testing.capture_logs() as logged:
        await client.sends(POST + b"Content-Length: 500000\r\n\r\nhello")
        await client.leaves()
    assert [message["type"] for message in client.server.received] == ["http.request", "http.disconnect"]
    assert (logged, client.answered, client.server.tasks) == ([], b"", set())


async def test_a_request_that_waits_goes_with_its_client() -> None:
    client = Client()
    await client.sends(b"GET /wait" + HOST + b"\r\n" + GET + b"\r\n")
    await client.leaves()
    assert [scope["path"] for scope in client.server.scopes] == ["/wait"]
    assert not client.server.tasks


async def test_a_request_that_waits_is_served_behind_the_first() -> None:
    client = Client()
    first = b"POST /" + HOST + b"Content-Length: 5\r\n\r\n"
    await client.sends(first + b"hell")
    assert client.statuses == []
    await client.sends(b"o" + b"GET /unread" + HOST + b"\r\n")
    assert client.answered.partition(b"hello")[2].endswith(b"unread")


async def test_reading_stops_while_a_body_waits_for_the_application() -> None:
    client = Client()
    await client.sends(b"GET /wait" + HOST + b"\r\n")
    client.connection.data_received(POST + b"Content-Length: 200000\r\n\r\n" + bytes(100_000))
    assert not client.transport.is_reading()


async def test_a_body_is_read_as_the_application_takes_it() -> None:
    client, body = Client(), bytes(1_000_000)
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    client.connection.data_received(head + body[:100_000])
    assert not client.transport.is_reading()
    for at in range(100_000, len(body), 100_000):
        await client.turns()
        assert client.transport.is_reading()
        client.connection.data_received(body[at : at + 100_000])
    await client.turns()
    assert client.statuses == [200]
    assert max(len(message["body"]) for message in client.server.received) == 100_000


async def test_an_answer_may_leave_the_body_unread() -> None:
    client, head = Client(), b"POST /unread" + HOST + b"Content-Length: 100000\r\n\r\n"
    await client.sends(head + bytes(40_000), bytes(60_000) + GET + b"\r\n")
    assert client.statuses == [200, 200]
    assert client.transport.is_reading()
    assert not client.transport.closed


async def test_a_body_that_breaks_behind_its_answer_gets_no_second_one() -> None:
    client = Client()
    await client.sends(b"POST /unread" + HOST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", b"zz\r\n")
    assert (client.statuses, client.transport.closed) == ([200], True)


async def test_a_body_that_breaks_is_answered_once() -> None:
    client = Client()
    await client.sends(CHUNKED + b"5\r\nhello\r\n", b"zz\r\n", GET + b"\r\n")
    assert (client.statuses, client.transport.closed) == ([400], True)
    assert client.server.received[-1] == {"type": "http.disconnect"}


@pytest.mark.parametrize("path", [b"/longer", b"/shorter"])
async def test_an_answer_that_is_not_as_long_as_said_ends_with_its_connection(path: bytes) -> None:
    client = Client()
    with structlog.testing.capture_logs() as logged:
        await client.sends(b"POST " + path + HOST + b"Content-Length: 5\r\n\r\nhello")
    assert [line["event"] for line in logged] == ["defect"]
    assert len(client.statuses) <= 1
    assert not client.answered.endswith(b"\r\n\r\nhello")
    assert client.transport.closed


async def test_the_server_stops_behind_the_last_answer() -> None:
    idle, busy, partly = Client(), Client(), Client()
    await busy.sends(POST + b"Content-Length: 5\r\n\r\nhell")
    await partly.sends(GET)
    for client in (idle, busy, partly):
        client.connection.shutdown()
    assert [client.transport.closed for client in (idle, busy, partly)] == [True, False, True]
    assert b"\r\nconnection: close\r\n" in await busy.sends(b"o")
    assert busy.transport.closed
