"""The two transports, which drive a flow over httpx. One blocks its thread, the other awaits in an event loop."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import httpx
import msgspec

from plait.client.errors import answer_error
from plait.client.flow import Flow, Pause, Request, connection_failed

T = TypeVar("T")

# Each `get` that waits holds a connection, so a limit on connections would delay other requests.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class Endpoint:
    """A gateway's address, and the options of connections. `timeout_s` does not include the wait for a value."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float, tls: ssl.SSLContext | bool) -> None:
        authorization = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        headers = {"content-type": "application/json", **authorization}
        self._timeout_s = timeout_s
        self.options: dict[str, Any] = {"base_url": base_url, "headers": headers, "verify": tls, "limits": _LIMITS}

    def arguments(self, request: Request) -> dict[str, Any]:
        """A request as httpx's keyword arguments."""
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + request.wait_s)
        content = None if request.body is None else msgspec.json.encode(request.body)
        return {"method": request.method, "url": request.path, "content": content, "timeout": timeout}


class BlockingTransport:
    """The transport of synchronous programs. Several threads may use it at once."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._arguments = endpoint.arguments
        self._http = httpx.Client(**endpoint.options)

    def run(self, flow: Flow[T]) -> T:
        with closing(flow):
            resume: Callable[[], Request | Pause] = partial(next, flow)
            while True:
                try:
                    step = resume()
                except StopIteration as end:
                    return cast("T", end.value)
                if isinstance(step, Pause):
                    time.sleep(step.s)
                    resume = partial(flow.send, None)
                    continue
                try:
                    resume = partial(flow.send, self._http.request(**self._arguments(step)))
                except httpx.TransportError as error:
                    resume = partial(flow.throw, error)

    @contextmanager
    def lines(self, request: Request) -> Iterator[Iterator[str]]:
        """The lines of a streamed answer, as they come. Raises `AnswerError` or `ConnectionFailedError`."""
        try:
            with self._http.stream(**self._arguments(request)) as response:
                if not response.is_success:
                    response.read()
                    raise answer_error(response)
                yield response.iter_lines()
        except httpx.TransportError as error:
            raise connection_failed(request, error) from error

    def close(self) -> None:
        self._http.close()


class AsyncTransport:
    """The transport of asynchronous programs. It belongs to one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._arguments = endpoint.arguments
        self._http = httpx.AsyncClient(**endpoint.options)

    async def run(self, flow: Flow[T]) -> T:
        with closing(flow):
            resume: Callable[[], Request | Pause] = partial(next, flow)
            while True:
                try:
                    step = resume()
                except StopIteration as end:
                    return cast("T", end.value)
                if isinstance(step, Pause):
                    await asyncio.sleep(step.s)
                    resume = partial(flow.send, None)
                    continue
                try:
                    resume = partial(flow.send, await self._http.request(**self._arguments(step)))
                except httpx.TransportError as error:
                    resume = partial(flow.throw, error)

    @asynccontextmanager
    async def lines(self, request: Request) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a streamed answer, as they come. Raises `AnswerError` or `ConnectionFailedError`."""
        try:
            async with self._http.stream(**self._arguments(request)) as response:
                if not response.is_success:
                    await response.aread()
                    raise answer_error(response)
                yield response.aiter_lines()
        except httpx.TransportError as error:
            raise connection_failed(request, error) from error

    async def close(self) -> None:
        await self._http.aclose()
