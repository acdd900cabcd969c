"""Scripted engines for tests of the data path's HTTP client: raw sockets that answer with given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from plait.backends.http.client import HttpClient
from tests.waiting import WITHIN_S

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
        async with asyncio.timeout(WITHIN_S):
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
    response = await client.request("POST", "/v1/completions", [(b"content-type", b"application/json")], body)
    return await response.read()


@contextlib.contextmanager
def full_backlog(address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port whose connections stay half open, as the listener's queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
