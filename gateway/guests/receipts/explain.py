"""`POST /admin/explain`: the decision that a call would get now. Nothing is booked, sent or counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from plait.backends.errors import CallerError, NotFoundError
from plait.backends.protocol.openai import decode_body, parse_request
from plait.backends.translation.translation import TRANSLATIONS
from plait.gateway.api.auth import AdminAccess
from plait.gateway.api.own_route import OwnRoute, json_answer
from plait.gateway.asgi import id_of
from plait.gateway.calls.annotations import read_annotations
from plait.gateway.calls.call import Asked
from plait.gateway.calls.call_reader import CallReader, Incoming
from plait.gateway.calls.routes import CHAT_PATH, KINDS, CallRoutes, ForwardedRequest
from plait.gateway.guests.receipts.receipts import Receipts
from plait.gateway.guests.receipts.view import shown
from plait.gateway.intake.open_bodies import ADMIN, OpenBodies
from plait.gateway.timer import loop_time_s

PATH = "/admin/explain"


class GivenCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The call to explain, as a client would send it; `headers` carry its annotations."""

    body: dict[str, Any]
    path: str = CHAT_PATH
    headers: dict[str, str] = {}
    without: str | None = None


_DECODER = msgspec.json.Decoder(GivenCall)


class ExplainApi:
    def __init__(
        self, calls: CallReader, routes: CallRoutes, receipts: Receipts, access: AdminAccess, bodies: OpenBodies
    ) -> None:
        self._routes = routes
        self._calls = replace(calls, tells_router=False)
        self._receipts = receipts
        self._access = access
        self._bodies = bodies
        self.routes = [OwnRoute("POST", PATH, self._explain, "What would be decided now for a call")]

    async def _explain(self, request: Request) -> Response:
        self._access.check(request)
        with self._bodies.open(request.scope, ADMIN) as opened:
            raw = await opened.read(request.receive, request.scope["headers"])
            given = decode_body(raw, _DECODER)
            asked = await self._asked(given, id_of(request.scope))
        router, without = self._calls.router, given.without or request.query_params.get("without")
        if without is not None and without not in router.engines:
            raise NotFoundError(f"There is no engine '{without}'.", code="engine_not_found", param="without")
        unable = () if without is None else (without,)
        placement = router.select(asked.call, loop_time_s(), unable=unable, route=asked.route, compares_all=True)
        receipt = self._receipts.explained(asked, placement)
        return json_answer(shown(receipt, str))

    async def _asked(self, given: GivenCall, request_id: str) -> Asked:
        """Read the call. Raises as if a client had sent it."""
        route = self._routes.get(given.path)
        if route is None and given.path not in KINDS:
            raise CallerError(f"path: {given.path} is no route of calls.", param="path")
        headers = [(name.lower().encode("latin-1", "replace"), value.encode()) for name, value in given.headers.items()]
        path, fields = given.path, given.body
        translation = TRANSLATIONS.get(given.path) or TRANSLATIONS.get(given.path.rpartition("/")[0])  # a count
        if translation is not None:
            path, fields = CHAT_PATH, translation.to_chat(fields)
        body = msgspec.json.encode(fields)
        incoming = Incoming(path, headers, body, request_id, loop_time_s(), "")
        if path in KINDS:
            read = parse_request(body, KINDS[path])
            return await self._calls.read(incoming, read, read_annotations(headers, read.plait, read.service_tier))
        assert route is not None
        forwarded = parse_request(body, ForwardedRequest)
        return await self._calls.forwarded(
            incoming, forwarded, route, read_annotations(headers, forwarded.plait, forwarded.service_tier)
        )
