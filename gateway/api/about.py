"""What tools and people ask a server about itself: version, liveness, load, its model, its routes."""

from __future__ import annotations

from html import escape
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from plait.gateway.api.auth import AdminAccess, KeyRing
from plait.gateway.api.openapi import document
from plait.gateway.fleet.router import Router

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


class About:
    """The routes of this module. They need no key, except those that tell which models there are."""

    def __init__(self, router: Router, keys: KeyRing, admin: AdminAccess) -> None:
        self._router = router
        self._keys = keys
        self._admin = admin
        self.routes = [
            Route("/", self._page),
            Route("/version", self._version),
            Route("/ping", self._ping, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/get_model_info", self._model_info),
            Route("/openapi.json", self._openapi),
        ]

    async def _page(self, request: Request) -> Response:
        """A page for people: the live view where there is one. It names the models only where anybody may ask."""
        if self._admin.is_offered(request):
            return RedirectResponse("admin/")  # relative: there may be a path before it
        named = ", ".join(sorted(self._router.models.names)) or "none so far"
        models = escape(named) if self._keys.is_open else "ask <code>/v1/models</code> with your key"
        return Response(_PAGE.format(version=VERSION, models=models), media_type="text/html")

    async def _version(self, _request: Request) -> Response:
        return _json({"version": VERSION})

    async def _ping(self, _request: Request) -> Response:
        return Response()

    async def _load(self, _request: Request) -> Response:
        """How many calls are on engines, under the name that vLLM gives it."""
        return _json({"server_load": sum(engine.view.outstanding for engine in self._router.engines.values())})

    async def _model_info(self, request: Request) -> Response:
        """The model that a request without a model gets, under SGLang's names. Raises as such a request does."""
        self._keys.check(request.scope["headers"])
        model = self._router.models.check("")
        return _json({"model_path": model, "tokenizer_path": model, "is_generation": True})

    async def _openapi(self, _request: Request) -> Response:
        return Response(document(VERSION), media_type="application/json")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
