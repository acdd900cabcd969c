"""The embedded engine's HTTP server: OpenAI's routes as vLLM serves them, over an emulated accelerator."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from plait.backends.embedded.clock import EngineClock
from plait.backends.embedded.completion import (
    Completion,
    ServedModel,
    Target,
    complete_chat,
    complete_text,
    in_emulated_time,
)
from plait.backends.embedded.engine import Engine, EngineSettings
from plait.backends.embedded.metrics import EngineCollector
from plait.backends.errors import AuthenticationError, CallerError, PlaitError
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.call_objectives import PATH as CALL_OBJECTIVES
from plait.backends.protocol.call_objectives import ChangesAnswer, read_changes
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, check_request, parse_request
from plait.policy.cost_model import CostModel

MAX_WAIT_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """`time_scale` emulated seconds pass in a real one. `api_key` protects all routes but `/health` and `/metrics`."""

    engine: EngineSettings
    cost_model: CostModel
    model: ServedModel
    time_scale: float = 1.0
    api_key: str | None = None


class EmbeddedServer:
    """One engine and its routes. `app` is the ASGI application. The cache is empty at first, and the epoch is new."""

    def __init__(self, settings: ServerSettings) -> None:
        self.engine = Engine(settings.engine, settings.cost_model, epoch=uuid.uuid4().hex)
        self._settings = settings
        self._annotations = AnnotationReader()
        # A call that does not fit into the KV cache can never run. The cache has whole blocks only.
        room_tokens = settings.engine.kv_tokens // settings.engine.block_tokens * settings.engine.block_tokens
        self._model = replace(settings.model, max_context_tokens=min(settings.model.max_context_tokens, room_tokens))
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(self.engine))
        self._clock: EngineClock
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/cache_state", self._cache_state),
                Route(CALL_OBJECTIVES, self._call_objectives, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={PlaitError: _answer_error},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self._clock = EngineClock(self.engine, self._settings.time_scale)
        yield
        await self._clock.close()

    async def _chat(self, request: Request) -> Response:
        self._authenticate(request)
        body = parse_request(await request.body(), ChatRequest)
        check_request(body)
        return CompletionResponse(complete_chat(body, self._target(request, body)))

    async def _completions(self, request: Request) -> Response:
        self._authenticate(request)
        body = parse_request(await request.body(), CompletionRequest)
        check_request(body)
        return CompletionResponse(complete_text(body, self._target(request, body)))

    async def _models(self, request: Request) -> Response:
        self._authenticate(request)
        model = {
            "id": self._model.name,
            "object": "model",
            "created": 0,
            "owned_by": "plait",
            "max_model_len": self._model.max_context_tokens,
        }
        return _json({"object": "list", "data": [model]})

    async def _cache_state(self, request: Request) -> Response:
        self._authenticate(request)
        since, wait_ms = _integer(request, "since"), _integer(request, "wait_ms") or 0
        wait_s = min(wait_ms, MAX_WAIT_MS) / 1e3
        state = await self._clock.cache_state(since, request.query_params.get("epoch"), wait_s)
        if "msgpack" in request.headers.get("accept", ""):
            return Response(msgspec.msgpack.encode(state), media_type="application/msgpack")
        return _json(state)

    async def _call_objectives(self, request: Request) -> Response:
        self._authenticate(request)
        changes = read_changes(await request.body(), self._annotations)
        scale = self._settings.time_scale
        return _json(ChangesAnswer(self.engine.refinable.refine(in_emulated_time(one, scale) for one in changes)))

    async def _health(self, _request: Request) -> Response:
        return Response(status_code=200)

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def _target(self, request: Request, body: ChatRequest | CompletionRequest) -> Target:
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        annotations = in_emulated_time(self._annotations.read(body.vllm_xargs), self._settings.time_scale)
        return Target(self._model, self._clock, request_id, annotations)

    def _authenticate(self, request: Request) -> None:
        key = self._settings.api_key
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            raise AuthenticationError("This engine needs its API key: send 'Authorization: Bearer KEY'.")


class CompletionResponse(Response):
    """Sends a completion, whole or as events. If the client disconnects, its calls are aborted at once."""

    def __init__(self, completion: Completion) -> None:
        super().__init__()
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the completion. Stop when the client disconnects."""
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        watching = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._completion.abort()
            watching.cancel()
            sending.cancel()
            results = await asyncio.gather(sending, watching, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._completion.stream:
            await _json(await self._completion.whole())(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._completion.events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _integer(request: Request, name: str) -> int | None:
    value = request.query_params.get(name)
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,18}", value):
        raise CallerError(f"'{name}' must be a whole number, not {value[:80]!r}", param=name)
    return int(value)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PlaitError)
    return Response(error.body(), status_code=error.status, media_type="application/json")
