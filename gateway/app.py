"""Builds the gateway from its configuration, as one ASGI application: the composition root."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.backends.errors import NotFoundError, PlaitError
from plait.backends.http.client import HttpClient, Timeouts
from plait.backends.profiles import load_profile
from plait.gateway.api.auth import KeyRing
from plait.gateway.api.openai_api import CompletionApi
from plait.gateway.api.semantic_api import SemanticApi
from plait.gateway.asgi import ClientGoneError
from plait.gateway.calls.call_reader import KINDS, CallReader
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.relay import EngineLink, Relay
from plait.gateway.calls.tokenization import PromptReader
from plait.gateway.config import Config
from plait.gateway.fleet.health import Health
from plait.gateway.fleet.metrics import FleetCollector
from plait.gateway.fleet.monitor import Monitor
from plait.gateway.fleet.router import Router
from plait.gateway.metrics import exposition, new_registry
from plait.gateway.programs.chained_calls import ChainedCalls
from plait.gateway.programs.executor import Executor
from plait.gateway.programs.metrics import ProgramMetrics, SessionCollector
from plait.gateway.timer import at_loop_time


class Gateway:
    """The ASGI application. Completions go straight to the data path, all other requests through Starlette.

    Raises ValueError for tokenizers or profiles that cannot be loaded.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.router = build_router(config)
        self._keys = KeyRing(config.server.api_keys)
        self._links = {engine.name: _link(config, engine.url, engine.api_key) for engine in config.engines}
        prompts = PromptReader(config, self.router.block_tokens)
        reader = CallReader(self.router, prompts, config.server.isolate_tenants)
        executor = Executor(config.sessions, reader.predicted_s, at_loop_time)
        self._registry = new_registry()
        self._registry.register(FleetCollector(self.router))
        self._registry.register(SessionCollector(executor))
        calls, programs = CallMetrics(self._registry), ProgramMetrics(self._registry)
        relay = Relay(self.router, self._links, calls, forward_client_key=self._keys.is_open)
        self._chained = ChainedCalls(executor, reader, relay, programs, keep_alive_s=config.sessions.keep_alive_s)
        body_bytes = config.server.max_body_bytes
        self._completions = CompletionApi(reader, relay, self._chained, self._keys, body_bytes)
        self._rest: ASGIApp = Starlette(
            routes=[
                *SemanticApi(self._chained, self._keys, body_bytes, config.sessions.keep_alive_s).routes,
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics_text),
                Route("/{path:path}", _unknown_path, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ],
            exception_handlers={PlaitError: _answer_error, ClientGoneError: _answer_nobody},
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] in KINDS:
            await self._completions(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        contexts = {model.name: model.max_context_tokens for model in self.config.models if model.max_context_tokens}
        monitor = Monitor(self.router, self.config.engines, self.config.upstream, contexts)
        self._chained.open()
        yield
        await self._chained.close()
        await monitor.close()
        for link in self._links.values():
            await link.client.aclose()

    async def _models(self, request: Request) -> Response:
        self._keys.check(request.scope["headers"])
        return _json({"object": "list", "data": [self._describe(model) for model in sorted(self.router.models.names)]})

    async def _model(self, request: Request) -> Response:
        self._keys.check(request.scope["headers"])
        model = request.path_params["model"]
        if model not in self.router.models.names:
            self.router.models.check(model)
        return _json(self._describe(model))

    def _describe(self, model: str) -> dict[str, object]:
        context_tokens = self.router.models.context_tokens(model)
        return {"id": model, "object": "model", "created": 0, "owned_by": "plait", "max_model_len": context_tokens}

    async def _health(self, _request: Request) -> Response:
        return _json({"status": "ok"})

    async def _ready(self, _request: Request) -> Response:
        """Whether an engine is up for every model that is configured or that an engine has listed."""
        wanted = self.router.models.names | {model.name for model in self.config.models}
        serving = {model: self.router.models.serving(model) for model in sorted(wanted)}
        ready = bool(serving) and all(serving.values())
        return _json({"ready": ready, "engines_up": serving}, status=200 if ready else 503)

    async def _metrics_text(self, _request: Request) -> Response:
        return Response(exposition(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})


def build_router(config: Config) -> Router:
    """The router for a configuration. Its engines are untried."""
    placement, upstream = config.placement, config.upstream
    router = Router(
        placement.policy,
        window_s=placement.window_s,
        prior_output_tokens=placement.prior_output_tokens,
        expected_models=[*(model.name for model in config.models), *(m for e in config.engines for m in e.models)],
    )
    for engine in config.engines:
        models = engine.models or tuple(model.name for model in config.models) or ("",)
        profile = load_profile(config.model(models[0]).profile)
        router.add_engine(
            engine.name,
            profile.cost_model(),
            kv_tokens=engine.kv_tokens or profile.kv.tokens,
            health=Health(upstream.probe_interval_s, upstream.probe_max_interval_s),
        )
    return router


def _link(config: Config, url: str, api_key: str | None) -> EngineLink:
    upstream = config.upstream
    timeouts = Timeouts(
        connect_s=upstream.connect_timeout_s,
        first_byte_s=upstream.first_byte_timeout_s,
        idle_s=upstream.idle_timeout_s,
    )
    return EngineLink(HttpClient(url, timeouts=timeouts), f"Bearer {api_key}".encode() if api_key else None)


async def _unknown_path(request: Request) -> Response:
    raise NotFoundError(f"Unknown path: {request.method} {request.url.path}.")


async def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PlaitError)
    return Response(error.body(), status_code=error.status, media_type="application/json")


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response()


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
