"""Routes about the server itself, for operators, tools and people: models, health, metrics, version and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.metadata import version

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from plait.backends.protocol.cache_state import TIERS
from plait.gateway.api.auth import AdminAccess, KeyRing
from plait.gateway.api.openapi import document
from plait.gateway.api.own_route import OwnRoute, json_answer
from plait.gateway.calls.routes import CallRoutes
from plait.gateway.config.sections import ModelConfig
from plait.gateway.fleet.engine import degradation, engine_status
from plait.gateway.fleet.health import TAKES_CALLS
from plait.gateway.fleet.router import Router
from plait.gateway.membership.hub_downloads import AwaitedTokenizer
from plait.gateway.metrics import scrape
from plait.gateway.others import Others

VERSION = version("plait")

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Plait</title>
<style>body{{font:16px/1.5 sans-serif;max-width:40em;margin:3em auto;padding:0 1em}}</style>
<h1>Plait {version}</h1>
<p>An OpenAI-compatible gateway. Point a client at <code>/v1</code> of this address.</p>
<p>Models: {models}.</p>
<ul><li><a href="v1/models">Models</a></li><li><a href="ready">Engines that are up</a></li>
<li><a href="metrics">Metrics</a></li><li><a href="openapi.json">Every route</a></li></ul>
</html>
"""


class Operations:
    """Models, health, readiness and metrics.

    `configured`: models that need an engine before the gateway is ready. `keys` are for the models, `metrics_keys` for
    the metrics. `awaited`: by model, its tokenizer that is still to be downloaded.
    """

    def __init__(
        self,
        router: Router,
        configured: Sequence[ModelConfig],
        keys: KeyRing,
        registry: CollectorRegistry,
        *,
        metrics_keys: KeyRing,
        awaited: Mapping[str, AwaitedTokenizer],
        is_stopping: Callable[[], bool],
        others: Others,
    ) -> None:
        self._others = others
        self._awaited = awaited
        self._is_stopping = is_stopping
        self._router = router
        self._configured = configured
        self._keys = keys
        self._metrics_keys = metrics_keys
        self._registry = registry
        self.routes = [
            OwnRoute("GET", "/v1/models", self._models, "The models that are served"),
            OwnRoute("GET", "/v1/models/{model:path}", self._model, "One model"),
            OwnRoute("GET", "/health", self._health, "Whether the gateway runs"),
            OwnRoute("GET", "/ready", self._ready, "Whether engines are up for every model"),
            OwnRoute("GET", "/metrics", self._metrics_text, "Prometheus metrics"),
        ]

    async def _models(self, request: Request) -> Response:
        self._keys.check(request.scope)
        models = self._router.models
        listed = models.names | {alias for alias, model in models.given.aliases.items() if model in models.names}
        answer: dict[str, object] = {"object": "list", "data": [self._describe(name) for name in sorted(listed)]}
        if "client_version" in request.query_params:  # Codex; other clients would prefer `models` to `data`
            answer["models"] = []  # an entry would replace Codex's own instructions
        return json_answer(answer)

    async def _model(self, request: Request) -> Response:
        self._keys.check(request.scope)
        name, models = request.path_params["model"], self._router.models
        if not name:
            return await self._models(request)
        if models.given.aliases.get(name, name) not in models.names:
            models.check(name)
        return json_answer(self._describe(name))

    def _describe(self, name: str) -> dict[str, object]:
        """A model as vLLM lists it: an alias has its model as `root`, an adapter has its base model as `parent`."""
        models = self._router.models
        model = models.given.aliases.get(name, name)
        base = models.base(model)
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "plait",
            "root": model,
            "parent": None if base == model else base,
            "max_model_len": models.contexts.get(model),
        }

    async def _health(self, _request: Request) -> Response:
        return json_answer({"status": "ok"})

    async def _ready(self, _request: Request) -> Response:
        """Whether an engine is up for every model that is configured or that an engine has listed.

        A stopping gateway is not ready, but still serves calls. The answer has these fields where they are not empty:

        - `out`: the engines that take no calls, each with its health. Only an open gateway shows engines' last errors.
        - `degraded`: the engines whose caches the gateway does not know or predicts wrongly, and why.
        - `tiers`: the engines whose adapter does only a part of its work, and which part.
        - `estimated`: the models whose tokenizers are still to be downloaded, so that prompts are estimated.
        """
        wanted = self._router.models.names | {model.name for model in self._configured}
        serving = {model: self._router.models.serving(model) for model in sorted(wanted)}
        stopping = self._is_stopping()
        ready = bool(serving) and all(serving.values()) and not stopping
        engines = self._router.engines.items()
        shows_all = self._keys.is_open  # an engine's error may quote a tenant's prompt
        degraded = {engine_id: problem for engine_id, engine in engines if (problem := degradation(engine)) is not None}
        out = {
            engine_id: engine_status(engine) | ({} if shows_all else {"last_error": None})
            for engine_id, engine in engines
            if engine.health.state not in TAKES_CALLS
        }
        answer: dict[str, object] = {"ready": ready, "engines_up": serving}
        answer |= {"stopping": True} if stopping else {}
        answer |= {"estimated": {model: one._asdict() for model, one in self._awaited.items()}} if self._awaited else {}
        answer |= self._others.described()
        tiers = {engine_id: engine.tier for engine_id, engine in engines if engine.tier not in (None, TIERS[-1])}
        told = {"out": out, "degraded": degraded, "tiers": tiers}
        answer |= {name: engines_told for name, engines_told in told.items() if engines_told}
        return json_answer(answer, status=200 if ready else 503)

    async def _metrics_text(self, request: Request) -> Response:
        self._metrics_keys.check(request.scope)
        return Response(await scrape(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})


class About:
    """Version, liveness, load, the default model and the OpenAPI document. Only the names of models need a key."""

    def __init__(self, router: Router, keys: KeyRing, admin: AdminAccess, calls: CallRoutes) -> None:
        self._calls = calls
        self._document: bytes | None = None
        self._router = router
        self._keys = keys
        self._admin = admin
        self.routes = [
            OwnRoute("GET", "/", self._page, "A page for people; leads to the live view where there is an admin API"),
            OwnRoute("GET", "/version", self._version, "The gateway's version"),
            OwnRoute("GET", "/ping", self._ping, "Whether the gateway runs", also={"POST": "Whether the gateway runs"}),
            OwnRoute("GET", "/load", self._load, "Calls on engines"),
            OwnRoute("GET", "/get_model_info", self._model_info, "The model that a request without a model gets"),
            OwnRoute("GET", "/openapi.json", self._openapi, "This document"),
        ]

    async def _page(self, request: Request) -> Response:
        """A page for people, or the live view where the admin API is offered. Only an open gateway names its models."""
        if self._admin.is_offered(request):
            return RedirectResponse("admin/")  # relative, because a proxy may add a path in front
        named = ", ".join(sorted(self._router.models.names)) or "none so far"
        models = escape(named) if self._keys.is_open else "ask <code>/v1/models</code> with your key"
        return Response(_PAGE.format(version=VERSION, models=models), media_type="text/html")

    async def _version(self, _request: Request) -> Response:
        return json_answer({"version": VERSION})

    async def _ping(self, _request: Request) -> Response:
        return Response()

    async def _load(self, _request: Request) -> Response:
        """How many calls are on engines, under vLLM's name for this number."""
        return json_answer({"server_load": sum(engine.view.outstanding for engine in self._router.engines.values())})

    async def _model_info(self, request: Request) -> Response:
        """The default model, under SGLang's names. Raises the error that a call without a model would get."""
        self._keys.check(request.scope)
        model = self._router.models.check("")
        return json_answer({"model_path": model, "tokenizer_path": model, "is_generation": True})

    async def _openapi(self, request: Request) -> Response:
        if self._document is None:
            self._document = document(VERSION, self._calls.values(), request.app.routes)
        return Response(self._document, media_type="application/json")
