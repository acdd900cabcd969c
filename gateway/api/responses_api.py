"""Stored responses over HTTP: read, delete, list the input."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.gateway.api.auth import KeyRing
from plait.gateway.calls.stored_responses import StoredResponses
from plait.gateway.timer import loop_time_s


class ResponsesApi:
    """The routes below `/v1/responses`. A tenant sees its own responses only."""

    def __init__(self, stored: StoredResponses, keys: KeyRing) -> None:
        self._stored = stored
        self._keys = keys
        self.routes = [
            Route("/v1/responses/{response_id}", self._get, methods=["GET"]),
            Route("/v1/responses/{response_id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/input_items", self._items, methods=["GET"]),
        ]

    async def _get(self, request: Request) -> Response:
        tenant, response_id = self._asked(request)
        return _json(self._stored.get(tenant, response_id, loop_time_s()).answer)

    async def _delete(self, request: Request) -> Response:
        tenant, response_id = self._asked(request)
        self._stored.delete(tenant, response_id, loop_time_s())
        return _json(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))

    async def _items(self, request: Request) -> Response:
        """The input, the latest item first, all of it on one page."""
        tenant, response_id = self._asked(request)
        items = msgspec.json.decode(self._stored.get(tenant, response_id, loop_time_s()).items, type=list[object])
        return _json(msgspec.json.encode({"object": "list", "data": items[::-1], "has_more": False}))

    def _asked(self, request: Request) -> tuple[str, str]:
        """The tenant, and the name of the response."""
        return self._keys.check(request.scope["headers"]), request.path_params["response_id"]


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
