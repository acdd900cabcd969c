"""A served embedded engine, and a client of it in the same process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2

from plait.backends.profiles import load_profile
from plait.backends.tokenization.loading import load_tokenizer
from plait.lab.embedded.completion import ServedModel
from plait.lab.embedded.engine import EngineSettings
from plait.lab.embedded.server import EmbeddedServer, ServerSettings

KV_TOKENS = 4_003  # no whole number of blocks


class Served:
    """A server and a client of it."""

    def __init__(self, server: EmbeddedServer, http: httpx.AsyncClient) -> None:
        self.server = server
        self.http = http

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "m", **body})

    async def chat(self, content: str = "hi", **body: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        response = await self.post("/v1/chat/completions", messages=messages, **body)
        assert response.status_code == 200, response.text
        return events(response) if body.get("stream") else response.json()

    async def complete(self, prompt: Any = "hi", **body: Any) -> Any:
        response = await self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return events(response) if body.get("stream") else response.json()


def events(response: httpx.Response) -> list[Any]:
    """A stream's events; it has to end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *rest, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in rest]


@asynccontextmanager
async def serving(
    api_key: str | None = None, tokenizer: str = "bytes", ranks: int = 1, lockstep: bool = False
) -> AsyncIterator[Served]:
    server = EmbeddedServer(
        ServerSettings(
            engine=EngineSettings(name="e", model="m", kv_tokens=KV_TOKENS),
            cost_model=load_profile("a6000-mistral-7b").cost_model(),
            model=ServedModel("m", load_tokenizer(tokenizer), KV_TOKENS),
            time_scale=10_000.0,
            api_key=api_key,
            ranks=ranks,
            lockstep=lockstep,
        )
    )
    transport = httpx.ASGITransport(server.app)
    async with (
        server.app.router.lifespan_context(server.app),
        httpx.AsyncClient(transport=transport, base_url="http://engine") as http,
    ):
        yield Served(server, http)


@asynccontextmanager
async def sdk_transport(served: Served) -> AsyncIterator[httpx2.AsyncClient]:
    """What the vendors' clients send their requests with."""
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=served.server.app)) as http:
        yield http
