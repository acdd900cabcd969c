"""The admin API: an operator lists, adds, drains and removes engines."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from plait.backends.errors import CallerError
from plait.backends.protocol.client_bodies import mended
from plait.backends.protocol.openai import decode_body
from plait.gateway.api.auth import AdminAccess
from plait.gateway.api.own_route import OwnRoute, json_answer
from plait.gateway.config.sections import EngineConfig
from plait.gateway.config.values import Positive, Text, Token
from plait.gateway.intake.open_bodies import ADMIN, MOST_ADMIN_BYTES, OpenBodies
from plait.gateway.membership.engine_set import EngineSet


class GivenEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/engines`: the fields of `[[engines]]`."""

    url: Text
    name: Token = ""
    models: tuple[Text, ...] = ()
    api_key: Token | None = None
    kv_tokens: Positive | None = None


class StateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/engines/{name}`."""

    state: Literal["active", "draining"]


BodyT = TypeVar("BodyT", GivenEngine, StateBody)


class AdminApi:
    """The routes under `/admin/engines`. `access` says where they are offered, and checks the operator's key."""

    def __init__(self, engines: EngineSet, access: AdminAccess, bodies: OpenBodies) -> None:
        self._engines = engines
        self._access = access
        self._bodies = bodies
        self.routes = [
            OwnRoute("GET", "/admin/engines", self._list, "The engines"),
            OwnRoute("POST", "/admin/engines", self._add, "Add an engine"),
            OwnRoute("GET", "/admin/engines/{name:path}", self._show, "One engine"),
            OwnRoute("POST", "/admin/engines/{name:path}", self._set_state, "Drain an engine, or give it calls again"),
            OwnRoute("DELETE", "/admin/engines/{name:path}", self._remove, "Remove an engine"),
        ]

    async def _list(self, request: Request) -> Response:
        self._access.check(request)
        return json_answer({"object": "list", "data": self._engines.describe_all()})

    async def _add(self, request: Request) -> Response:
        body = await self._read(request, GivenEngine)
        try:
            engine = EngineConfig(**msgspec.structs.asdict(body))
            self._engines.add(engine)
        except ValueError as error:
            raise CallerError(f"{error}.", param="url") from error
        return json_answer(self._engines.describe(engine.name), 201)

    async def _show(self, request: Request) -> Response:
        self._access.check(request)
        return json_answer(self._engines.describe(request.path_params["name"]))

    async def _set_state(self, request: Request) -> Response:
        body, name = await self._read(request, StateBody), request.path_params["name"]
        self._engines.drain(name, draining=body.state == "draining")
        return json_answer(self._engines.describe(name))

    async def _remove(self, request: Request) -> Response:
        self._access.check(request)
        name = request.path_params["name"]
        if request.query_params.get("force") == "true":
            await self._engines.cut(name)
        else:
            self._engines.remove(name)
        return json_answer({"object": "engine.deleted", "name": name, "deleted": True})

    async def _read(self, request: Request, kind: type[BodyT]) -> BodyT:
        self._access.check(request)
        with self._bodies.open(request.scope, ADMIN) as opened:
            raw = await opened.read(request.receive, request.scope["headers"], MOST_ADMIN_BYTES)
        return mended(decode_body, raw or b"{}", msgspec.json.Decoder(kind))[0]
