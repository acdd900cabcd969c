"""An `HttpClient` whose requests a function answers, in the types of httpx."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

import plait.gateway.membership.engine_requests
from plait.backends.errors import EngineError, EngineGarbledError, EngineTimeoutError
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.membership.engine_requests import EngineRequests

Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


class FakeHttp:
    """Takes the requests to an engine to `answer`."""

    def __init__(self, answer: Answer, url: str) -> None:
        self._answer = answer
        self._url = url

    async def request(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b""
    ) -> FakeResponse:
        try:
            answer = await self._answer(httpx.Request(method, self._url + path, headers=headers, content=body))
        except httpx.TimeoutException as error:
            raise EngineTimeoutError(str(error)) from error
        except httpx.HTTPError as error:
            raise EngineError(str(error)) from error
        return FakeResponse(answer.status_code, answer.content)

    async def speaks_tls(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class FakeResponse:
    """A response that has come."""

    status: int
    body: bytes

    async def gather(self, limit_bytes: int) -> bytes:
        if len(self.body) > limit_bytes:
            raise EngineGarbledError("too long")
        return self.body

    def abort(self) -> None:
        """All has come."""


def answer_requests(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    """From now on the gateway's own requests to engines go to `answer`."""

    def client(url: str, **_options: object) -> FakeHttp:
        return FakeHttp(answer, url)

    monkeypatch.setattr(plait.gateway.membership.engine_requests, "HttpClient", client)


@contextmanager
def requests_to(answer: Answer) -> Iterator[EngineRequests]:
    """Requests to an engine that answers so."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        answer_requests(monkeypatch, answer)
        with EngineRequests(EngineConfig(name="e", url="http://e"), UpstreamConfig()) as requests:
            yield requests
