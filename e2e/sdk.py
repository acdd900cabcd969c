"""The OpenAI SDK as the tests use it: one way to ask through its sync and its async client."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from e2e.server_process import NO_TLS, Server


def sync_client(server: Server, **options: Any) -> OpenAI:
    """The SDK's client, without its retries: they would hide failures."""
    return OpenAI(http_client=DefaultHttpxClient(verify=NO_TLS), **_options(server, options))


def async_client(server: Server, **options: Any) -> AsyncOpenAI:
    """The SDK's other client, without its retries."""
    return AsyncOpenAI(http_client=DefaultAsyncHttpxClient(verify=NO_TLS), **_options(server, options))


def _options(server: Server, options: dict[str, Any]) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "unused", "max_retries": 0, **options}


def asking(text: str, **fields: Any) -> dict[str, Any]:
    """The fields of a chat completion of 8 tokens, unless `fields` say otherwise."""
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


class Sdk:
    """Either client; answers are awaited, and a stream is the list of its chunks."""

    def __init__(self, client: OpenAI | AsyncOpenAI) -> None:
        self.client = client

    async def chat(self, **request: Any) -> Any:
        """`chat.completions.create`."""
        return await self._collected(self.client.chat.completions.create, request)

    async def text(self, **request: Any) -> Any:
        """`completions.create`."""
        return await self._collected(self.client.completions.create, request)

    async def close(self) -> None:
        """Close its connections."""
        if isinstance(self.client, AsyncOpenAI):
            await self.client.close()
        else:
            self.client.close()

    async def _collected(self, create: Any, request: dict[str, Any]) -> Any:
        if isinstance(self.client, AsyncOpenAI):
            answer = await create(**request)
            return [chunk async for chunk in answer] if request.get("stream") else answer

        def collected() -> Any:
            answer = create(**request)
            return list(answer) if request.get("stream") else answer

        return await asyncio.to_thread(collected)


def content(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a streamed chat completion."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def refusal(error: object) -> tuple[int, str | None]:
    """The status and the code of an error that the SDK raised."""
    assert isinstance(error, APIStatusError)
    return error.status_code, error.code
