"""A stream that breaks off, on every route: the released SDKs raise, and nobody takes half a text for a whole one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from plait.backends.errors import EngineError, EngineTimeoutError
from plait.gateway.calls.call_reader import CallReader, PromptReader
from plait.gateway.server.open_requests import OpenRequests
from plait.gateway.server.request_bounds import RequestLimits
from tests.gateway.api.fake_relay import HI, Api
from tests.gateway.calls.scripted_engines import Exchange, FakeHttp, gateway
from tests.gateway.server.serving import serving

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CHAT = b"""data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":\
{"role":"assistant","content":"half"},"finish_reason":null}]}\n\n"""
TEXT = b"""data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"half",\
"finish_reason":null,"logprobs":null}]}\n\n"""
RESPONSE = b"""event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"r",\
"object":"response","created_at":1,"model":"m","status":"in_progress","output":[],"parallel_tool_calls":true,\
"tool_choice":"auto","tools":[]}}\n\n"""
MESSAGE = b"""event: message_start\ndata: {"type":"message_start","message":{"id":"m","type":"message","role":\
"assistant","model":"m","content":[],"stop_reason":null,"usage":{"input_tokens":5,"output_tokens":0}}}\n\n\
event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\
\n\n\
event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"half"}}\
\n\n"""

Ask = Callable[[Any, Any], Awaitable[Any]]
"""Asks by OpenAI's client or by Anthropic's."""


async def chat(client: Any, _: Any) -> Any:
    return [event async for event in await client.chat.completions.create(model="m", messages=HI, stream=True)]


async def text(client: Any, _: Any) -> Any:
    return [event async for event in await client.completions.create(model="m", prompt="hi", stream=True)]


async def response(client: Any, _: Any) -> Any:
    return [event async for event in await client.responses.create(model="m", input="hi", stream=True)]


async def message(_: Any, client: Any) -> Any:
    async with client.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
        return await stream.get_final_message()


ROUTES: dict[str, tuple[Ask, bytes, set[str]]] = {
    "chat": (chat, CHAT, set()),
    "text": (text, TEXT, set()),
    "response": (response, RESPONSE, {RESPONSES}),
    "translated response": (response, CHAT, set()),
    "message": (message, MESSAGE, {MESSAGES}),
    "translated message": (message, CHAT, set()),
}
BREAKS: dict[str, list[bytes | EngineError | None]] = {
    "killed": [],
    "reset": [EngineError("engine a closed the connection")],
    "bad event": [b"event: content_block_delta\ndata: {half\n\n"],
    "time-out": [EngineTimeoutError("engine a sent nothing for 9 s")],
    "gateway stopping": [None],
}


@asynccontextmanager
async def clients(
    prompts: PromptReader, pieces: list[bytes | EngineError | None], routes: set[str]
) -> AsyncIterator[tuple[OpenRequests, FakeHttp, openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    """The released SDKs at a gateway whose engine has these routes, and answers so."""
    async with gateway(engine := FakeHttp(Exchange(pieces=pieces))) as made:
        made.relay._attempts._max_attempts = 1
        made.router.health.answered("a", {"m": 1_000}, routes=routes)
        api = Api(prompts)
        completions = replace(api.app.completions, calls=CallReader(made.router, prompts), relay=made.relay)
        made_of: dict[str, Any] = dict(api.preparers)
        preparers = {path: replace(preparer, completions=completions) for path, preparer in made_of.items()}
        app = replace(api.app, completions=completions, preparers=preparers)
        async with (
            serving(RequestLimits(), application=app, errors_of=api.app.routes.errors_of) as running,
            httpx2.AsyncClient() as http,
        ):
            given: dict[str, Any] = {"api_key": "k", "max_retries": 0, "http_client": http}
            yield (
                running.requests,
                engine,
                openai.AsyncOpenAI(base_url=f"{running.url}/v1", **given),
                anthropic.AsyncAnthropic(base_url=running.url, **given),
            )


@pytest.mark.parametrize("has_begun", [True, False], ids=["after the first event", "before"])
@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("route", ROUTES)
async def test_the_sdk_raises(prompts: PromptReader, route: str, how: str, has_begun: bool) -> None:
    ask, first, routes = ROUTES[route]
    pieces = [*([first] if has_begun else []), *BREAKS[how]]
    async with clients(prompts, pieces, routes) as (requests, engine, ours, theirs):
        asked = asyncio.ensure_future(ask(ours, theirs))
        if how == "gateway stopping":
            while not engine.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.wait([asked], timeout=0.2)
            assert not asked.done()
            requests.cut()
        with pytest.raises((openai.APIError, anthropic.APIError, ValueError)):  # ValueError: the event is no JSON
            await asked
