"""What a client that breaks HTTP gets: the real server, sockets, a tiny application."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from typing import Any

import pytest
import structlog
from starlette.types import Receive, Scope, Send

from plait.gateway.asgi import send_whole
from plait.gateway.server import request_bounds
from plait.gateway.server.connection import Connection
from plait.gateway.server.served_request import ServedRequest
from tests.gateway.server.serving import CHUNKED, GET, HAPPENED, IMPATIENT, LIMITS, POST, serving
from tests.waiting import SLOWNESS, WITHIN_S


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error object of an answer that is one error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"x-request-id: " in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"hello\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET nowhere HTTP/1.1\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\n\r\n",
    GET + b"a b: c\r\n\r\n",
    GET + b"a: \x01\r\n\r\n",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Content-Length: x\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    GET + b"Host: a\r\n\r\n",
    b"GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n",
    POST + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("request_bytes", MALFORMED, ids=repr)
async def test_what_is_not_http_is_refused(request_bytes: bytes) -> None:
    async with serving() as running:
        status, error = error_of(await running.ask(request_bytes))
    assert (status, error["code"], error["type"]) == (400, "invalid_http", "invalid_request_error")
    assert [refused.code for refused in running.refused] == ["invalid_http"]


@pytest.mark.parametrize(
    ("pieces", "status", "code"),
    [
        ([GET + b"a: b\r\n" * 8 + b"\r\n"], 431, "too_many_headers"),
        ([GET + b"a: " + b"b" * 2_000 + b"\r\n\r\n"], 431, "headers_too_large"),
        ([b"GET /" + b"b" * 2_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"], 431, "headers_too_large"),
        ([GET + b"a: ", *[b"b" * 1_000] * 4], 431, "headers_too_large"),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 9_000], 431, "headers_too_large"),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\na: ", b"b" * 9_000], 431, "headers_too_large"),
        ([CHUNKED + b"\r\n1;" + b"x" * 3_000 + b"\r\nx\r\n0\r\n\r\n"], 431, "headers_too_large"),
        ([CHUNKED + b"\r\n", *[b"1;" + b"x" * 500 + b"\r\nx\r\n"] * 5], 431, "headers_too_large"),
        ([CHUNKED + b"\r\n", b"2000\r\n" + b"x" * 0x2000 + b"\r\n1;" + b"x" * 3_000], 431, "headers_too_large"),
        ([CHUNKED + b"\r\n1000\r\n" + b"x" * 0x1000 + b"\r\n0\r\na: " + b"b" * 3_000 + b"\r\n\r\n"], 431,
         "headers_too_large"),
        ([CHUNKED + b"\r\n0\r\n" + b"a: b\r\n" * 7 + b"\r\n"], 431, "too_many_headers"),
        ([GET], 408, "request_timeout"),
        ([b"\r\n"], 408, "request_timeout"),
        ([POST + b"Content-Length: 5\r\n\r\nhe"], 408, "request_timeout"),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n"], 408, "request_timeout"),
    ],
)  # fmt: skip
async def test_a_request_over_a_limit_is_refused(pieces: list[bytes], status: int, code: str) -> None:
    async with serving(IMPATIENT if status == 408 else LIMITS) as running:
        given, error = error_of(await running.ask(*pieces, pause_s=0.02))
    assert (given, error["code"]) == (status, code)
    assert [refused.code for refused in running.refused] == [code]


async def test_a_connection_that_sends_nothing_is_closed_without_a_word() -> None:
    async with serving(IMPATIENT) as running:
        assert await running.ask() == b""
    assert not running.refused


async def test_empty_lines_on_an_idle_connection_are_not_answered() -> None:
    """A client that has had its answer would take another one for that of its next request."""
    async with serving(IMPATIENT) as running:
        answer = await running.ask(GET + b"\r\n", b"\r\n", pause_s=0.1)
    assert (answer.count(b"HTTP/1.1 "), running.refused) == (1, [])


async def test_a_connection_that_is_idle_is_closed_and_not_before() -> None:
    idle_s = 1.0 * SLOWNESS
    async with serving(keep_alive_s=idle_s) as running:
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for _ in range(3):
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n/")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.4 * idle_s)
        began_s = loop.time()
        assert await reader.read() == b""
        assert loop.time() - began_s > 0.25 * idle_s
        writer.close()
    assert not running.refused


async def test_idle_connections_make_room_for_new_ones_and_busy_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    last = GET + b"Connection: close\r\n\r\n"
    monkeypatch.setattr(request_bounds, "LEAST_IDLE_S", WITHIN_S)
    async with serving() as running:

        async def opened(request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(request)
            await asyncio.sleep(0.05)
            return reader, writer

        kept = [await opened(GET + b"\r\n"), await opened(GET), await opened(b"")]
        await kept[0][0].readuntil(b"\r\n\r\n/")
        assert (await running.ask(last)).startswith(b"HTTP/1.1 503"), "a request may be on its way"
        monkeypatch.setattr(request_bounds, "LEAST_IDLE_S", 0.0)
        assert (await running.ask(last)).startswith(b"HTTP/1.1 200")
        assert await kept[0][0].read() == b"", "idle for longest"
        kept.append(await opened(GET.replace(b"/", b"/wait", 1) + b"\r\n"))
        assert (await running.ask(last)).startswith(b"HTTP/1.1 200")
        assert await kept[2][0].read() == b"", "has never sent a request"
        kept.append(await opened(GET))
        assert (await running.ask(last)).startswith(b"HTTP/1.1 503")
        for _, writer in kept:
            writer.close()
    assert [refused.code for refused in running.refused] == ["too_many_connections"] * 2


async def test_a_connection_is_idle_once_its_body_has_ended_after_the_answer() -> None:
    async with serving(keep_alive_s=0.2, application=refusing) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(POST + b"Content-Length: 40000\r\n\r\n" + bytes(20_000))
        assert b" 401 " in await reader.readuntil(b"\r\n\r\nno")
        writer.write(bytes(20_000))
        assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
        writer.close()


async def test_the_rest_of_a_body_is_read_for_its_time_however_fast_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bounds, "DRAIN_S", 0.2)
    async with serving(application=refusing) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % 2**40)
        assert b" 401 " in await reader.readuntil(b"\r\n\r\nno")

        async def send() -> None:
            while True:
                writer.write(bytes(request_bounds.MIN_BODY_BYTES_S))
                await writer.drain()
                await asyncio.sleep(0.01)

        sending = asyncio.create_task(send())
        assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
        sending.cancel()
        writer.close()


async def refusing(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answers before the body has come."""
    await send_whole(send, 401, [], b"no")


async def test_an_idle_client_that_does_not_read_its_answer_is_let_go() -> None:
    async with serving(keep_alive_s=0.2) as running:
        running.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
            client.connect(("127.0.0.1", running.port))
            body = bytes(9_900)
            for _ in range(6):
                client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                await asyncio.sleep(0.02)
            async with asyncio.timeout(WITHIN_S):
                while running.server.server_state.connections:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_a_client_of_http_1_0_may_leave_its_host_out() -> None:
    async with serving() as running:
        assert (await running.ask(b"GET /ready HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\n/ready")


async def test_a_request_is_freed_without_the_garbage_collector() -> None:
    def left() -> set[int]:
        return {id(one) for one in gc.get_objects() if isinstance(one, ServedRequest | Connection)}

    async with serving() as running:
        gc.collect()
        gc.disable()
        try:
            others = left()  # that other tests hold
            for _ in range(3):
                await running.ask(GET + b"Connection: close\r\n\r\n")
            await asyncio.sleep(0.05)
            assert left() <= others
        finally:
            gc.enable()


async def test_a_slow_request_in_time_is_served() -> None:
    async with serving() as running:
        pieces = [GET, b"Connection: close\r\n", b"\r\n"]
        assert (await running.ask(*pieces, pause_s=0.05)).endswith(b"\r\n\r\n/")


async def test_connections_are_bounded() -> None:
    async with serving() as running:
        idle = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(3)]
        for _, writer in idle:
            writer.write(GET)
        await asyncio.sleep(0.05)
        status, error = error_of(await running.ask(GET + b"\r\n"))
        assert (status, error["code"]) == (503, "too_many_connections")
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        while running.server.server_state.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await running.ask(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "two": b"Upgrade: h2c\r\nconnection: upgrade\r\nupgrade: websocket\r\n",
}
BODIES = {
    "nothing": (b"\r\n", b"/"),
    "a length": (b"Content-Length: 5\r\n\r\nhello", b"hello"),
    "chunks": (b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("upgrade", UPGRADES)
async def test_an_upgrade_is_ignored_and_the_body_is_read(upgrade: str, body: str) -> None:
    sent, read = BODIES[body]
    request = POST + UPGRADES[upgrade] + sent
    last = POST + b"Connection: close\r\nContent-Length: 4\r\n\r\nlast"
    async with serving() as running:
        whole = await running.ask(request + request + last)
        parted = await running.ask(*[request[at : at + 16] for at in range(0, len(request), 16)], last)
    assert [answer.partition(b"\r\n\r\n")[2] for answer in whole.split(b"HTTP/1.1 ")[1:]] == [read, read, b"last"]
    assert [answer.partition(b"\r\n\r\n")[2] for answer in parted.split(b"HTTP/1.1 ")[1:]] == [read, b"last"]


async def test_a_body_behind_an_upgrade_may_wait_to_be_asked_for() -> None:
    async with serving() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(POST + UPGRADES["h2c"] + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"hello")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_tunnel_is_no_upgrade() -> None:
    async with serving() as running:
        answer = await running.ask(b"CONNECT http://a/b HTTP/1.1\r\nHost: a\r\n\r\n" + GET + b"\r\n")
    assert answer.endswith(b"\r\n\r\n/b")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("rest", [b"Content-Length: x\r\n\r\n", b"Transfer-Encoding: gzip\r\n\r\n", b"Host: b\r\n\r\n"])
async def test_an_upgrade_hides_no_fault(rest: bytes) -> None:
    async with serving() as running:
        status, error = error_of(await running.ask(POST + UPGRADES["h2c"] + rest))
    assert (status, error["code"]) == (400, "invalid_http")


async def test_trailers_are_no_headers() -> None:
    async with serving() as running:
        head = b"POST /headers HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await running.ask(head + b"1\r\nx\r\n0\r\nAuthorization: later\r\n\r\n")
    assert answer.endswith(b"\r\n\r\nhost connection transfer-encoding")


@pytest.mark.parametrize("framing", [b"1\r\n%b\r\n", b"000001\r\n%b\r\n", b"1;a=b\r\n%b\r\n"])
async def test_chunks_may_be_small(framing: bytes) -> None:
    body = b"0123456789" * 10
    chunks = b"".join(framing % bytes([digit]) for digit in body) + b"0\r\nDigest: c\r\n\r\n"
    async with serving() as running:
        request = CHUNKED + b"Connection: close\r\n\r\n" + chunks
        for pieces in ([request], [request[:500], request[500:]]):
            assert (await running.ask(*pieces)).endswith(body)


async def test_an_answer_under_way_is_not_mixed_with_a_refusal() -> None:
    async with serving() as running:
        answer = await running.ask(GET + b"\r\nnonsense")
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1") == 1


async def test_an_application_is_told_that_its_client_has_gone() -> None:
    HAPPENED.update(running=asyncio.Event(), gone=asyncio.Event())
    async with serving() as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET /watched HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.wait_for(HAPPENED["running"].wait(), WITHIN_S)
        assert not HAPPENED["gone"].is_set()
        writer.close()
        await asyncio.wait_for(HAPPENED["gone"].wait(), WITHIN_S)


async def test_a_client_that_asks_to_close_gets_an_answer_that_comes_before_its_request_has_ended() -> None:
    body = bytes(8_000_000)
    head = b"POST /defect HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(head)
        for begin in range(0, len(body), 100_000):
            writer.write(body[begin : begin + 100_000])
            await writer.drain()
        answer = await reader.read()  # to the end: it is closed then
        writer.close()
    assert error_of(answer)[0] == 500


async def test_a_refused_client_may_send_on() -> None:
    """Its answer is not lost to a reset."""
    async with serving() as running:
        big = b"x" * 100_000
        answer = await running.ask(GET + b"a: " + big, *[big] * 20)
    assert error_of(answer)[0] == 431


async def test_requests_that_wait_on_a_connection_are_bounded() -> None:
    async with serving() as running:
        answer = await running.ask((GET + b"\r\n") * 200)
    assert answer.count(b"HTTP/1.1 200") == 1


async def test_a_defect_is_an_error_object_and_logged_once() -> None:
    with structlog.testing.capture_logs() as logs:
        async with serving() as running:
            request = b"GET /defect HTTP/1.1\r\nHost: a\r\nx-request-id: r-1\r\nConnection: close\r\n\r\n"
            status, error = error_of(await running.ask(request))
    assert (status, error["code"], error["type"]) == (500, "internal_error", "server_error")
    assert "r-1" in error["message"]
    assert [(entry["event"], entry["request_id"]) for entry in logs if entry.get("exc_info")] == [("defect", "r-1")]


async def test_a_stream_with_a_defect_ends_with_an_error_event() -> None:
    async with serving() as running:
        answer = await running.ask(b"GET /broken HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert answer.count(b"data: ") == 2
    assert b'"code":"internal_error"' in answer
    assert answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(("path", "code"), [(b"/wait", b"503"), (b"/stream", b"200")])
async def test_a_call_that_is_cut_at_shutdown_is_told(path: bytes, code: bytes) -> None:
    async with serving() as running:
        asked = asyncio.create_task(running.ask(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n"))
        await asyncio.sleep(0.1)
    answer = await asked
    assert answer.split()[1] == code
    assert b'"code":"gateway_stopping"' in answer
