"""The admin API: an operator lists, adds, drains and removes engines."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.backends.errors import CallerError, NotFoundError
from plait.backends.protocol.openai import decode_body
from plait.gateway.api.auth import KeyRing
from plait.gateway.asgi import read_body
from plait.gateway.calls.engine_set import EngineSet
from plait.gateway.config import EngineConfig
from plait.gateway.config_values import Positive, Text, Token

MAX_BODY_BYTES = 2**16


class EngineBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/engines`: the fields of `[[engines]]`."""

    url: Text
    name: Token = ""
    models: tuple[Text, ...] = ()
    api_key: Token | None = None
    kv_tokens: Positive | None = None


class StateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/engines/{name}`."""

    state: Literal["active", "draining"]


BodyT = TypeVar("BodyT", EngineBody, StateBody)


class AdminApi:
    """The routes under `/admin`. They need a key of `keys`, and answer 404 while there is none.

    With a `port`, they answer on the listener with this port only.
    """

    def __init__(self, engines: EngineSet, keys: KeyRing, port: int | None) -> None:
        self._engines = engines
        self._keys = keys
        self._port = port
        self.routes = [
            Route("/admin/engines", self._list, methods=["GET"]),
            Route("/admin/engines", self._add, methods=["POST"]),
            Route("/admin/engines/{name:path}", self._show, methods=["GET"]),
            Route("/admin/engines/{name:path}", self._set_state, methods=["POST"]),
            Route("/admin/engines/{name:path}", self._remove, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        self._check(request)
        return _json({"object": "list", "data": self._engines.describe_all()})

    async def _add(self, request: Request) -> Response:
        body = await self._read(request, EngineBody)
        try:
            engine = EngineConfig(**msgspec.structs.asdict(body))
        except ValueError as error:
            raise CallerError(f"{error}.", param="url") from error
        self._engines.add(engine)
        return _json(self._engines.describe(engine.name), 201)

    async def _show(self, request: Request) -> Response:
        self._check(request)
        return _json(self._engines.describe(request.path_params["name"]))

    async def _set_state(self, request: Request) -> Response:
        body, name = await self._read(request, StateBody), request.path_params["name"]
        self._engines.drain(name, draining=body.state == "draining")
        return _json(self._engines.describe(name))

    async def _remove(self, request: Request) -> Response:
        self._check(request)
        name = request.path_params["name"]
        if request.query_params.get("force") == "true":
            await self._engines.cut(name)
        else:
            self._engines.remove(name)
        return _json({"object": "engine.deleted", "name": name, "deleted": True})

    async def _read(self, request: Request, kind: type[BodyT]) -> BodyT:
        self._check(request)
        raw = await read_body(request.receive, request.scope["headers"], MAX_BODY_BYTES)
        return decode_body(raw or b"{}", msgspec.json.Decoder(kind))

    def _check(self, request: Request) -> None:
        """Raises `NotFoundError` where there is no admin API, and `AuthenticationError` for a wrong key."""
        _, port = request.scope.get("server") or ("", None)
        if self._keys.is_open or self._port not in (None, port):
            raise NotFoundError(f"Unknown path: {request.method} {request.url.path}.")
        self._keys.check(request.scope["headers"])


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
