"""The embedded engine's HTTP server: the routes that vLLM serves, over an emulated accelerator."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from plait.backends.adapter.named_ranks import NamedRanks
from plait.backends.errors import PlaitError
from plait.backends.protocol.api_errors import COMPLETION_ERRORS, MESSAGE_ERRORS, RESPONSE_ERRORS, ApiErrors
from plait.backends.protocol.call_objectives import PATH as CALL_OBJECTIVES
from plait.backends.protocol.tokenizer_files import PATH as TOKENIZER
from plait.backends.translation.translation import COUNT_PATH
from plait.gateway.server.connection import ClientBounds
from plait.gateway.server.http_server import new_config, run
from plait.gateway.server.listening import ListeningServer, bound_sockets
from plait.gateway.server.open_requests import OpenRequests
from plait.lab.embedded.beside_chat import RoutesBesideChat
from plait.lab.embedded.clock import EngineClock
from plait.lab.embedded.completion import ServedModel
from plait.lab.embedded.completion_routes import CompletionRoutes, TokenRoutes
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.engine_routes import EngineRoutes, description_of
from plait.lab.embedded.ranks import Ranks
from plait.lab.embedded.serving import Serving, json_response
from plait.policy.costs.cost_model import CostModel

OF_ADAPTERS = frozenset(("/cache_state", CALL_OBJECTIVES, TOKENIZER))
"""The routes that adapters add to engines."""
ERRORS: Final[Mapping[str, ApiErrors]] = {
    "/v1/responses": RESPONSE_ERRORS,
    "/v1/messages": MESSAGE_ERRORS,
    COUNT_PATH: MESSAGE_ERRORS,
}
"""The error form of each route that is not one of OpenAI's completions."""
OF_OTHER_APIS = frozenset(ERRORS)
"""The routes of Responses and Messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """`time_scale` emulated seconds pass in a real one. `api_key` protects all routes except health and metrics.

    A `stock` engine has no adapter's routes. A `chat_only` engine has neither Responses nor Messages, so that a gateway
    has to translate them.
    """

    engine: EngineSettings
    cost_model: CostModel
    model: ServedModel
    time_scale: float = 1.0
    api_key: str | None = None
    stock: bool = False
    chat_only: bool = False
    ranks: int = 1
    """Data-parallel ranks: engines with the settings of `engine`, called `NAME@RANK` if there are several."""
    lockstep: bool = False
    """The ranks step together, as those of a mixture of experts do."""


class EmbeddedServer:
    """Engines, one a rank, and their routes. `app` is the ASGI application. Caches are empty at first, epochs new."""

    def __init__(self, settings: ServerSettings) -> None:
        tokenizer = settings.model.tokenizer.fingerprint
        name = settings.engine.name
        self.engines = [
            Engine(replace(settings.engine, name=one), settings.cost_model, epoch=uuid.uuid4().hex, tokenizer=tokenizer)
            for one in ([name] if settings.ranks == 1 else [f"{name}@{rank}" for rank in range(settings.ranks)])
        ]
        self._lockstep = settings.lockstep
        # A call that does not fit into the KV cache can never run.
        room_tokens = min(settings.model.max_context_tokens, self.engines[0].room_tokens)
        model = replace(settings.model, max_context_tokens=room_tokens)
        self._serving = Serving(
            ranks=Ranks(self.engines), model=model, time_scale=settings.time_scale, api_key=settings.api_key
        )
        self._routes = [
            route
            for group in (CompletionRoutes, RoutesBesideChat, TokenRoutes, EngineRoutes)
            for route in group(self._serving).routes
            if not (settings.stock and route.path in OF_ADAPTERS)
            if not (settings.chat_only and route.path in OF_OTHER_APIS)
        ]
        self.app = Starlette(
            routes=[*self._routes, self._serving.route("/openapi.json", self._openapi, "GET")],
            exception_handlers={PlaitError: _answer_error},
            middleware=[Middleware(NamedRanks, count=lambda: settings.ranks)],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        groups = [self.engines] if self._lockstep else [[engine] for engine in self.engines]
        clocks = [EngineClock(group, self._serving.time_scale) for group in groups]
        self._serving.clocks = clocks * len(groups[0])
        yield
        for clock in clocks:
            await clock.close()

    async def _openapi(self, _request: Request) -> Response:
        return json_response(description_of(self._routes))


async def _answer_error(request: Request, error: Exception) -> Response:
    """The error in the shape of the route's API."""
    assert isinstance(error, PlaitError)
    body = ERRORS.get(request.url.path, COMPLETION_ERRORS).body(error)
    return Response(body, status_code=error.status, media_type="application/json")


def run_server(app: ASGIApp, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; running requests then get a second. Raises ValueError if the port is taken."""
    sockets = bound_sockets(host, port)
    config = new_config(OpenRequests(app), ClientBounds(), host=host, port=port, timeout_graceful_shutdown=1)
    run(ListeningServer(config), sockets)
