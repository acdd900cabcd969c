"""The data path's HTTP client against scripted engines: raw sockets that answer with given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from plait.backends.errors import EngineError, EngineTimeoutError, EngineUnreachableError
from plait.backends.http.client import HttpClient, Timeouts

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKED_END = b"2\r\nok\r\n0\r\n\r\n"
CHUNKED = CHUNKED_HEAD + CHUNKED_END
TOO_LARGE = b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nok"

Scenario = Callable[[], Coroutine[Any, Any, None]]


def on_both_loops(scenario: Scenario) -> Callable[[Callable[[], asyncio.AbstractEventLoop]], None]:
    """Runs an async test on asyncio's own loop and on uvloop; an error that only the loop saw fails it too."""

    @pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def test(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        unseen: list[dict[str, Any]] = []

        async def run() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
            await scenario()

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(run())
        assert unseen == []

    return test


class Peer:
    """One connection that an engine has accepted."""

    def __init__(self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.engine = engine
        self.reader = reader
        self.writer = writer
        self.requests: list[bytes] = []
        engine.peers.append(self)

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def request(self) -> bytes:
        """The next request, head and body; whoever closes instead ends the script."""
        head = await self.head()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        request = head + await self.reader.readexactly(length)
        self.requests.append(request)
        self.engine.requests.append(request)
        return request

    def send(self, answer: bytes) -> None:
        self.writer.write(answer)

    async def closed(self) -> None:
        """Returns once the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 20):
                pass


Script = Callable[[Peer], Awaitable[None]]


class Engine:
    """A server that runs `script` for each connection, and closes it when the script ends."""

    def __init__(self, script: Script) -> None:
        self.peers: list[Peer] = []
        self.requests: list[bytes] = []
        self.port = 0
        self._script = script
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.create_task(self._serve(Peer(self, reader, writer))))

    async def finished(self) -> None:
        """Returns once all scripts have ended; their failures are raised."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self.peers:
            peer.writer.transport.abort()

    async def _serve(self, peer: Peer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._script(peer)
        peer.writer.close()


@contextlib.asynccontextmanager
async def serving(
    script: Script, *, server_tls: ssl.SSLContext | None = None, base_path: str = "", **options: Any
) -> AsyncIterator[tuple[Engine, HttpClient]]:
    """An engine that runs `script`, and a client for it."""
    engine = Engine(script)
    server = await asyncio.start_server(engine.accept, "127.0.0.1", 0, ssl=server_tls)
    engine.port = server.sockets[0].getsockname()[1]
    url = engine.url if server_tls is None else f"https://localhost:{engine.port}"
    client = HttpClient(url + base_path, **options)
    try:
        async with asyncio.timeout(20):
            yield engine, client
    finally:
        await client.aclose()
        assert repr(client) == f"<HttpClient {url}{base_path} open=0 idle=0 closed>"
        server.close()
        await engine.stop()
        await server.wait_closed()


def answering(*answers: bytes) -> Script:
    """Answers the requests of each connection with these bytes in turn, then waits for the client to close."""

    async def script(peer: Peer) -> None:
        for answer in answers:
            await peer.request()
            peer.send(answer)
        await peer.closed()

    return script


async def always(peer: Peer) -> None:
    """Answers every request."""
    while await peer.request():
        peer.send(OK)


async def silent(peer: Peer) -> None:
    """Takes a request and never answers."""
    await peer.request()
    await peer.closed()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (a condition outside of this loop's events)
        await asyncio.sleep(0.001)


def counts(client: HttpClient) -> str:
    return " ".join(repr(client).rstrip(">").split()[2:4])


async def ask(client: HttpClient, body: bytes = b"{}") -> bytes:
    response = await client.post("/v1/completions", [(b"content-type", b"application/json")], body)
    return await response.read()


# What goes out.


@on_both_loops
async def test_a_request_carries_the_base_path_the_host_the_length_and_the_headers_given() -> None:
    async with serving(always, base_path="/engines/a/") as (engine, client):
        response = await client.post("/v1/completions?x=1", [(b"x-request-id", b"r1"), (b"accept", b"*/*")], b'{"a":1}')
        assert (response.status, await response.read()) == (200, b"ok")
        assert engine.requests == [
            b"POST /engines/a/v1/completions?x=1 HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-length: 7\r\n"
            b'x-request-id: r1\r\naccept: */*\r\n\r\n{"a":1}' % engine.port
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
        response = await client.post("/", [], bytes(32 << 20))
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
            await client.post(path, headers, b"")


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


# Reuse of connections.


@on_both_loops
async def test_sequential_calls_share_a_connection() -> None:
    async with serving(always) as (engine, client):
        for _ in range(5):
            assert await ask(client) == b"ok"
            assert counts(client) == "open=1 idle=1"
        assert len(engine.peers) == 1
        (connection,) = client._open
        assert connection._transport is not None
        tcp = connection._transport.get_extra_info("socket")
        assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@on_both_loops
async def test_the_connection_that_became_idle_last_is_reused_first() -> None:
    async with serving(always) as (engine, client):
        first, second = await asyncio.gather(client.post("/", [], b"1"), client.post("/", [], b"2"))
        assert (await first.read(), await second.read()) == (b"ok", b"ok")
        hottest = list(client._idle)[-1]
        await ask(client, b"3")
        await ask(client, b"4")
        assert list(client._idle)[-1] is hottest
        assert sorted(len(peer.requests) for peer in engine.peers) == [1, 3]


@on_both_loops
async def test_no_more_idle_connections_than_allowed_are_kept() -> None:
    async with serving(always, max_idle=2) as (_, client):
        assert await asyncio.gather(*[ask(client) for _ in range(5)]) == [b"ok"] * 5
        await until(lambda: counts(client) == "open=2 idle=2")


@on_both_loops
async def test_an_idle_connection_closes_itself_after_its_time() -> None:
    async with serving(always, idle_ttl_s=0.002) as (engine, client):
        assert await ask(client) == b"ok"
        await until(lambda: counts(client) == "open=0 idle=0")
        await engine.finished()


@on_both_loops
async def test_an_idle_connection_that_the_engine_closes_leaves_the_pool() -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        peer.send(OK)

    async with serving(once) as (engine, client):
        assert await ask(client) == b"ok"
        await until(lambda: counts(client) == "open=0 idle=0")
        assert await ask(client) == b"ok"
        assert len(engine.peers) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother",
        OK + b"H",
        OK + b"garbage",
    ],
)
async def test_a_connection_that_must_close_or_holds_leftover_bytes_is_not_reused(answer: bytes) -> None:
    async with serving(answering(answer)) as (engine, client):
        for _ in range(2):
            assert await ask(client) == b"ok"
        assert len(engine.peers) == 2
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_bytes_that_come_while_it_is_idle_close_a_connection() -> None:
    async def chatty(peer: Peer) -> None:
        await peer.request()
        peer.send(OK)
        await until(lambda: counts(client) == "open=1 idle=1")
        peer.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await peer.closed()

    async with serving(chatty) as (engine, client):
        assert await ask(client) == b"ok"
        await until(lambda: counts(client) == "open=0 idle=0")
        await engine.finished()


# Stale connections.


def closing_second(*first_bytes: bytes) -> Script:
    """The first connection answers once and closes on its second request, after these bytes; others always answer."""

    async def script(peer: Peer) -> None:
        if peer is not peer.engine.peers[0]:
            await always(peer)
        await peer.request()
        peer.send(OK)
        await peer.request()
        for piece in first_bytes:
            peer.send(piece)

    return script


@on_both_loops
async def test_a_stale_connection_is_replaced_by_a_fresh_one() -> None:
    async with serving(closing_second()) as (engine, client):
        assert await ask(client, b"1") == b"ok"
        assert await ask(client, b"2") == b"ok"
        assert [[request[-1:] for request in peer.requests] for peer in engine.peers] == [[b"1", b"2"], [b"2"]]


@on_both_loops
async def test_a_connection_that_was_reset_is_stale_too() -> None:
    async def resetting(peer: Peer) -> None:
        if peer is not peer.engine.peers[0]:
            await always(peer)
        await peer.request()
        peer.send(OK)
        await peer.head()
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.writer.transport.abort()

    async with serving(resetting) as (engine, client):
        assert await ask(client) == b"ok"
        assert await ask(client, bytes(5 << 20)) == b"ok"
        assert len(engine.peers) == 2


@on_both_loops
async def test_the_fresh_connection_is_not_replaced_again() -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        if len(peer.engine.peers) == 1:
            peer.send(OK)
            await peer.request()

    async with serving(once) as (engine, client):
        assert await ask(client) == b"ok"
        with pytest.raises(EngineError, match="without a response") as caught:
            await ask(client)
        assert type(caught.value) is EngineError
        assert len(engine.peers) == 2


@on_both_loops
async def test_a_call_whose_answer_has_begun_is_not_sent_again() -> None:
    async with serving(closing_second(b"H")) as (engine, client):
        assert await ask(client) == b"ok"
        with pytest.raises(EngineError, match="without a response"):
            await ask(client)
        assert len(engine.requests) == 2


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
        response = await client.post("/", [], b"")
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
        response = await client.post("/", [], b"")
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
        response = await client.post("/", [], b"")
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
        response = await client.post("/", [], b"")
        await stalled()
        assert sum(sent) < total
        assert response.unread_bytes <= (64 + 256) << 10  # the limit and one read
        assert len(await response.read()) == total
        assert counts(client) == "open=1 idle=1"


# Time.


@on_both_loops
async def test_an_engine_that_does_not_begin_to_answer_times_out() -> None:
    async with serving(silent, timeouts=Timeouts(first_byte_s=0.005)) as (engine, client):
        with pytest.raises(EngineTimeoutError, match=rf"{engine.url} did not begin to answer within 0\.005 s"):
            await ask(client)
        await engine.finished()


@on_both_loops
async def test_an_engine_that_sends_a_head_and_no_token_times_out() -> None:
    async with serving(answering(CHUNKED_HEAD), timeouts=Timeouts(first_byte_s=0.02)) as (engine, client):
        response = await client.post("/", [], b"")
        assert response.status == 200
        with pytest.raises(EngineTimeoutError, match=rf"{engine.url} did not begin to answer within 0\.02 s"):
            await response.read_chunk()
        await engine.finished()


@on_both_loops
async def test_an_engine_that_goes_silent_times_out_after_what_arrived() -> None:
    async with serving(answering(CHUNKED_HEAD + b"1\r\na\r\n"), timeouts=Timeouts(idle_s=0.005)) as (engine, client):
        response = await client.post("/", [], b"")
        assert await response.read_chunk() == b"a"
        with pytest.raises(EngineTimeoutError, match=rf"{engine.url} went silent for 0\.005 s"):
            await response.read_chunk()
        await engine.finished()


@contextlib.contextmanager
def full_backlog() -> Iterator[int]:
    """A port whose connections stay half open, as the listener's queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@on_both_loops
async def test_an_engine_that_does_not_accept_is_unreachable() -> None:
    with full_backlog() as port:
        client = HttpClient(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect_s=0.005))
        with pytest.raises(EngineUnreachableError, match=rf"127\.0\.0\.1:{port} cannot be reached") as caught:
            await ask(client)
        assert caught.value.cause == "connect_timeout"
        assert counts(client) == "open=0 idle=0"


# Failing to connect.


@on_both_loops
async def test_a_refused_connection_is_an_unreachable_engine() -> None:
    async with serving(always) as (engine, _):
        port = engine.port
    client = HttpClient(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineUnreachableError, match=f"http://127.0.0.1:{port} cannot be reached"):
        await ask(client)


@on_both_loops
async def test_an_engine_that_hangs_up_at_once_fails_the_call() -> None:
    async def unwilling(peer: Peer) -> None:
        peer.writer.transport.abort()

    async with serving(unwilling) as (engine, client):
        with pytest.raises(EngineError, match=engine.url):
            await ask(client)
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_a_host_name_that_cannot_be_one_is_an_unreachable_engine() -> None:
    with pytest.raises(EngineUnreachableError, match="cannot be reached"):
        await ask(HttpClient(f"http://{'a' * 64}.localhost:80"))


@on_both_loops
async def test_an_engine_that_speaks_no_tls_is_unreachable_over_https() -> None:
    async def plain(peer: Peer) -> None:
        await peer.reader.read(1)
        peer.send(OK)

    async with serving(plain) as (engine, _):
        client = HttpClient(f"https://127.0.0.1:{engine.port}")
        with pytest.raises(EngineUnreachableError, match="cannot be reached"):
            await ask(client)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_an_engine_can_be_reached_over_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = ["openssl", "req", "-x509", *curve, *names, "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_tls.load_cert_chain(certificate, key)
    trust = ssl.create_default_context(cafile=certificate)

    async def scenario() -> None:
        async with serving(always, server_tls=server_tls, tls=trust) as (engine, client):
            for _ in range(2):
                assert await ask(client) == b"ok"
            assert await ask(client, bytes(1 << 20)) == b"ok"
            assert len(engine.peers) == 1
            with pytest.raises(EngineUnreachableError, match=r"engine e cannot be reached$") as caught:
                await ask(HttpClient(f"https://localhost:{engine.port}", name="e"))
            assert "certificate" in str(caught.value.__cause__)

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        on_both_loops(scenario)(new_loop)


# Giving up.


async def half(peer: Peer) -> None:
    """Answers with a stream that goes silent."""
    await peer.request()
    peer.send(CHUNKED_HEAD + b"1\r\na\r\n")
    await peer.closed()


@on_both_loops
async def test_an_aborted_response_closes_the_connection_as_the_engine_sees() -> None:
    async with serving(half) as (engine, client):
        response = await client.post("/", [], b"")
        assert await response.read_chunk() == b"a"
        response.abort()
        response.abort()
        await engine.finished()
        with pytest.raises(EngineError, match="given up"):
            await response.read_chunk()
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_aborting_a_response_that_has_arrived_whole_keeps_the_connection() -> None:
    async with serving(always) as (engine, client):
        for _ in range(2):
            response = await client.post("/", [], b"")
            await until(lambda: counts(client) == "open=1 idle=1")
            response.abort()
            assert await response.read() == b"ok"
        assert len(engine.peers) == 1


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@on_both_loops
async def test_cancelling_a_call_that_waits_for_its_answer_closes_the_connection() -> None:
    async with serving(silent) as (engine, client):
        task = asyncio.create_task(client.post("/", [], b""))
        await until(lambda: len(engine.requests) == 1)
        await cancelled(task)
        await engine.finished()
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_cancelling_a_reader_closes_the_connection() -> None:
    async with serving(half) as (engine, client):
        response = await client.post("/", [], b"")
        assert await response.read_chunk() == b"a"
        task = asyncio.create_task(response.read_chunk())
        await asyncio.sleep(0)
        await cancelled(task)
        await engine.finished()
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_cancelling_a_call_that_is_being_written_closes_the_connection() -> None:
    go = asyncio.Event()

    async def late(peer: Peer) -> None:
        await go.wait()
        await peer.closed()

    async with serving(late) as (engine, client):
        task = asyncio.create_task(client.post("/", [], bytes(32 << 20)))
        await until(lambda: counts(client) == "open=1 idle=0" and len(engine.peers) == 1)
        await cancelled(task)
        go.set()
        await engine.finished()
        await until(lambda: counts(client) == "open=0 idle=0")


@on_both_loops
async def test_cancelling_a_call_that_connects_leaves_nothing_behind() -> None:
    with full_backlog() as port:
        client = HttpClient(f"http://127.0.0.1:{port}")
        task = asyncio.create_task(ask(client))
        await asyncio.sleep(0.002)
        await cancelled(task)
        assert counts(client) == "open=0 idle=0"


@on_both_loops
async def test_cancelling_at_any_step_releases_the_connection_exactly_once() -> None:
    async with serving(answering(CHUNKED, CHUNKED, CHUNKED)) as (_, client):
        for steps in range(25):
            task = asyncio.create_task(ask(client))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: counts(client) in {"open=0 idle=0", "open=1 idle=1"})
        assert await ask(client) == b"ok"


@on_both_loops
async def test_a_closed_client_fails_what_runs_and_refuses_what_comes() -> None:
    async with serving(half) as (engine, client):
        response = await client.post("/", [], b"")
        assert await response.read_chunk() == b"a"
        await client.aclose()
        await engine.finished()
        with pytest.raises(EngineError, match="the gateway closed its connection"):
            await response.read_chunk()
        with pytest.raises(EngineUnreachableError, match="the gateway has closed its connections"):
            await ask(client)


@on_both_loops
async def test_a_client_closed_while_a_call_connects_does_not_let_it_begin() -> None:
    async with serving(always) as (engine, client):
        task = asyncio.create_task(ask(client))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(EngineUnreachableError):
            await task
        assert engine.requests == []
