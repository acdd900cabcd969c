"""The connection to a gateway that all sessions of a client share, and the requests that end brief sessions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from plait.client.errors import ClientError
from plait.client.flow import Flow, Retries
from plait.client.native_steps import NativeRunner
from plait.client.transport import AsyncTransport, BlockingTransport

_THREADS = 8
"""Enough for 32 ends a second at 250 ms each, more than a thread makes that runs programs one after the other."""


class Endings:
    """Ends sessions in the background. Only the client's end waits for these requests.

    A failure is not reported, because the gateway ends an idle session by itself.
    """

    def __init__(self, blocking: BlockingTransport, asynchronous: AsyncTransport) -> None:
        self._blocking = blocking
        self._asynchronous = asynchronous
        self._threads = ThreadPoolExecutor(_THREADS, "plait-endings")
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, flow: Flow[None]) -> None:
        self._threads.submit(self._run, flow)

    def astart(self, flow: Flow[None]) -> None:
        task = asyncio.get_running_loop().create_task(self._arun(flow))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self._threads.shutdown()

    async def aclose(self) -> None:
        self.close()
        await asyncio.gather(*self._tasks)

    def _run(self, flow: Flow[None]) -> None:
        with suppress(ClientError):
            self._blocking.run(flow)

    async def _arun(self, flow: Flow[None]) -> None:
        with suppress(ClientError):
            await self._asynchronous.run(flow)


@dataclass(frozen=True, slots=True)
class Connection:
    """The two transports to one gateway. `model` is the default model of semantic functions."""

    blocking: BlockingTransport
    asynchronous: AsyncTransport
    endings: Endings
    natives: NativeRunner
    retries: Retries
    model: str | None
