"""A route that is no call's, with what the OpenAPI document says of it, and the answers of such routes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from plait.gateway.asgi import RETRY_AFTER_S


class OwnRoute(Route):
    """One `method` of a path, and `also` others with their summaries.

    `body` is the type of its JSON body, of which `example` is one. `annotations` are those that its requests may have,
    `tells` the headers of Plait's that its answers may have.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        summary: str,
        *,
        body: type[msgspec.Struct] | None = None,
        example: Mapping[str, object] | None = None,
        annotations: Collection[str] = (),
        tells: Collection[str] = (),
        also: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.summaries = {method: summary, **also}
        super().__init__(path, endpoint, methods=[*self.summaries])
        self.body = body
        self.example = example
        self.annotations = annotations
        self.tells = tells


def json_answer(value: object, status: int = 200) -> Response:
    """An answer with `value`, which may be JSON already, as `msgspec.Raw`."""
    headers = {"retry-after": f"{RETRY_AFTER_S[status]:.0f}"} if status in RETRY_AFTER_S else None
    return Response(msgspec.json.encode(value), status_code=status, headers=headers, media_type="application/json")
