"""The header that names a data-parallel rank, on every route of an engine's API server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from plait.backends.adapter.named_ranks import NamedRanks, named_rank
from plait.backends.adapter.routes import Scope

RANKS = 2


class App:
    """Keeps the rank that each request named, as a task sees it that the request begins."""

    def __init__(self) -> None:
        self.named: list[int | None] = []

    async def __call__(self, *_: Any) -> None:
        async def computes() -> None:
            await asyncio.sleep(0)
            self.named.append(named_rank())

        await asyncio.create_task(computes())


async def answered(app: App, *values: str) -> list[dict[str, Any]]:
    """What the client of a request with these values of the header gets from the middleware itself."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    headers = [
        (b"content-type", b"application/json"),
        *((b"x-data-parallel-rank", one.encode("latin-1")) for one in values),
    ]
    scope: Scope = {"type": "http", "path": "/v1/embeddings", "headers": headers}
    await NamedRanks(app, lambda: RANKS)(scope, receive, send)
    return sent


async def test_a_request_keeps_the_rank_that_it_names() -> None:
    app = App()
    await asyncio.gather(*(answered(app, *values) for values in ((), ("1",), ("0",), ("01",), ())))
    assert sorted(app.named, key=str) == [0, 1, 1, None, None]
    assert named_rank() is None


@pytest.mark.parametrize("value", ["2", "-1", "", "x", "1,1", "1.0", "+1", "²", "1" * 9999])
async def test_a_rank_that_the_server_lacks_is_refused(value: str) -> None:
    app = App()
    start, body = await answered(app, value)
    assert start["status"] == 400
    assert msgspec.json.decode(body["body"])["error"]["type"] == "invalid_request_error"
    assert app.named == []


async def test_what_is_no_request_passes() -> None:
    app = App()
    await NamedRanks(app, lambda: RANKS)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert app.named == [None]
