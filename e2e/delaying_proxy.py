"""A network between a client and a server on this machine: a TCP proxy that delays each byte, in a thread of its own.

Half of the round trip passes in each direction. The bandwidth is not limited. The set-up of a connection costs no round
trip: a client that keeps its connections pays it once, and one that does not pays it for each call.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from tests.waiting import WITHIN_S


class DelayingProxy:
    """Listens on a port of its own while it is entered. `round_trip_s` may change between requests.

    `connections` counts those that clients opened. `requests` has the first words of what a client says at first, and
    after each answer: as HTTP/1.1 has one request at a time on a connection, those are methods and paths. The bytes
    `spoils` become as many others in what clients send. With `tls`, clients have to speak TLS.
    """

    def __init__(
        self, port: int, round_trip_s: float = 0.25, spoils: bytes = b"", tls: ssl.SSLContext | None = None
    ) -> None:
        self.round_trip_s = round_trip_s
        self.spoils = spoils
        self.connections = 0
        self.requests: list[str] = []
        self._server_port = port
        self._tls = tls
        self._sides: set[asyncio.StreamWriter] = set()
        self._port: Future[int] = Future()
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    @property
    def url(self) -> str:
        """Where a client finds the server behind it."""
        return f"{'http://127.0.0.1' if self._tls is None else 'https://localhost'}:{self._port.result()}"

    def forget(self) -> None:
        """All requests and connections so far."""
        self.connections = 0
        self.requests.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        self._port.result(WITHIN_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WITHIN_S)
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        self._port.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()
        for side in self._sides:
            side.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        conversation = _Conversation(self)
        sides = {writer, far_writer}
        self._sides |= sides
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(conversation.pass_on(reader, far_writer, is_client=True))
                both.create_task(conversation.pass_on(far_reader, writer, is_client=False))
            await asyncio.sleep(self.round_trip_s)  # the last bytes are on their way
        finally:
            self._sides -= sides
            for side in sides:
                side.close()


class _Conversation:
    """One connection: who spoke last."""

    def __init__(self, proxy: DelayingProxy) -> None:
        self._proxy = proxy
        self._client_spoke = False

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_client: bool) -> None:
        """Pass bytes on in one direction until its end."""
        loop, due_s = asyncio.get_running_loop(), 0.0
        while True:
            try:
                data = await reader.read(2**16)
            except ConnectionError:
                data = b""
            due_s = max(loop.time() + self._proxy.round_trip_s / 2, due_s + 1e-6)
            if not data:
                loop.call_at(due_s, writer.close)
                return
            if is_client and not self._client_spoke:
                self._proxy.requests.append(data.partition(b" HTTP/")[0].decode())
            self._client_spoke = is_client
            if is_client and self._proxy.spoils:
                data = data.replace(self._proxy.spoils, b"x" * len(self._proxy.spoils))
            loop.call_at(due_s, _write, writer, data)


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)
