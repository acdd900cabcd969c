"""The data path's HTTP client against scripted engines: what goes out, and what comes in."""

from __future__ import annotations

import asyncio

import pytest

from plait.backends.errors import EngineError
from plait.backends.http.client import HttpClient
from tests.backends.http.scripted_engine import (
    CHUNKED_END,
    CHUNKED_HEAD,
    TOO_LARGE,
    Peer,
    always,
    answering,
    ask,
    counts,
    on_both_loops,
    serving,
    until,
)

# What goes out.


@on_both_loops
async def test_a_request_carries_the_base_path_the_host_the_length_and_the_headers_given() -> None:
    async with serving(always, base_path="/engines/a/") as (engine, client):
        response = await client.request(
            "POST", "/v1/completions?x=1", [(b"x-request-id", b"r1"), (b"accept", b"*/*")], b'{"a":1}'
        )
        assert (response.status, await response.read()) == (200, b"ok")
        assert engine.requests == [
            b"POST /engines/a/v1/completions?x=1 HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-length: 7\r\n"
            b'accept-encoding: identity\r\nx-request-id: r1\r\naccept: */*\r\n\r\n{"a":1}' % engine.port
        ]


@on_both_loops
async def test_a_large_body_arrives_unchanged_though_the_engine_reads_late() -> None:
    body = bytes(range(256)) * 20_000
    go = asyncio.Event()

    async def late(peer: Peer) -> None:
        await go.wait()
        await always(peer)

    async with serving(late) as (engine, client):
        task = asyncio.create_task(ask(client, body))
        await until(lambda: counts(client) == "open=1 idle=0")
        go.set()
        assert await task == b"ok"
        assert engine.requests[0].endswith(b"\r\n\r\n" + body)
        assert await ask(client) == b"ok"
        assert len(engine.peers) == 1


@pytest.mark.parametrize("parts", [[TOO_LARGE], [CHUNKED_HEAD, CHUNKED_END]], ids=["whole", "begun"])
async def test_an_answer_before_the_whole_request_is_returned_and_ends_the_connection(parts: list[bytes]) -> None:
    answered = asyncio.Event()

    async def hasty(peer: Peer) -> None:
        await peer.head()
        for part in parts:
            peer.send(part)
            await answered.wait()
        await peer.closed()

    async with serving(hasty) as (engine, client):
        response = await client.request("POST", "/", [], bytes(32 << 20))
        assert response.status in {200, 413}
        answered.set()
        assert await response.read() == b"ok"
        assert counts(client).endswith("idle=0")
        await engine.finished()
        await until(lambda: counts(client) == "open=0 idle=0")


async def test_a_newline_in_a_header_or_path_is_refused_before_anything_is_sent() -> None:
    client = HttpClient("http://127.0.0.1:9")
    for path, headers in (("/a\nb", []), ("/", [(b"x", b"1\r\ny: 2")]), ("/", [(b"x\n", b"1")])):
        with pytest.raises(ValueError, match="newline"):
            await client.request("POST", path, headers, b"")


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:80",
        "ftp://h",
        "http://",
        "http://user:secret@h",
        "http://h/?q=1",
        "http://h/#f",
        "http://é",
        "http://h:x",
    ],
)
def test_a_url_that_is_no_origin_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        HttpClient(url)


# What comes in.


@on_both_loops
async def test_a_stream_is_read_as_it_comes() -> None:
    read = asyncio.Event()

    async def stream(peer: Peer) -> None:
        await peer.request()
        peer.send(CHUNKED_HEAD)
        for token in (b"a", b"b", b"c"):
            peer.send(b"1\r\n%b\r\n" % token)
            await read.wait()
            read.clear()
        peer.send(b"0\r\n\r\n")
        await peer.closed()

    async with serving(stream) as (_, client):
        response = await client.request("POST", "/", [], b"")
        for token in (b"a", b"b", b"c"):
            assert await response.read_chunk() == token
            read.set()
        assert await response.read_chunk() == b""
        assert counts(client) == "open=1 idle=1"


@on_both_loops
async def test_a_body_with_no_length_ends_with_the_connection() -> None:
    async def until_close(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\nall of")
        peer.send(b" it")

    async with serving(until_close) as (_, client):
        assert await ask(client) == b"all of it"
        await until(lambda: counts(client) == "open=0 idle=0")


@pytest.mark.parametrize(
    ("answer", "arrives"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"half"),
        (CHUNKED_HEAD + b"4\r\nhalf\r\n", b"half"),
        (CHUNKED_HEAD + b"9\r\nhalf", b"half"),
    ],
)
async def test_a_connection_lost_in_mid_body_is_an_error_after_what_arrived(answer: bytes, arrives: bytes) -> None:
    async def breaking(peer: Peer) -> None:
        await peer.request()
        peer.send(answer)

    async with serving(breaking) as (engine, client):
        response = await client.request("POST", "/", [], b"")
        assert await response.read_chunk() == arrives
        for _ in range(2):
            with pytest.raises(EngineError, match=f"{engine.url} closed the connection in the middle"):
                await response.read_chunk()


@pytest.mark.parametrize(
    "answer",
    [
        b"SMTP ready\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 12_000,
    ],
    ids=["other", "smuggled", "upgrade", "endless"],
)
async def test_a_head_that_cannot_be_read_is_the_engines_error(answer: bytes) -> None:
    async with serving(answering(answer)) as (engine, client):
        with pytest.raises(EngineError, match=f"engine {engine.url} sent"):
            await ask(client)
        await engine.finished()


async def test_chunks_that_cannot_be_read_are_the_engines_error() -> None:
    async with serving(answering(CHUNKED_HEAD + b"2\r\nok\r\nnot a length\r\n")) as (engine, client):
        response = await client.request("POST", "/", [], b"")
        assert await response.read_chunk() == b"ok"
        with pytest.raises(EngineError, match=f"engine {engine.url} sent bytes that are not"):
            await response.read_chunk()
        await engine.finished()


@on_both_loops
async def test_an_engine_is_held_back_while_nobody_reads() -> None:
    total = 32 << 20
    sent: list[int] = []

    async def pouring(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for _ in range(total >> 16):
            peer.send(bytes(1 << 16))
            await peer.writer.drain()
            sent.append(1 << 16)
        await peer.closed()

    async def stalled() -> None:
        before = -1
        while before != len(sent):
            before = len(sent)
            for _ in range(5):
                await asyncio.sleep(0.002)

    async with serving(pouring) as (_, client):
        response = await client.request("POST", "/", [], b"")
        await stalled()
        assert sum(sent) < total
        assert response.unread_bytes <= (64 + 256) << 10  # the limit and one read
        assert len(await response.read()) == total
        assert counts(client) == "open=1 idle=1"
