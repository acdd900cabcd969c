"""A route that is no call's, with what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from starlette.routing import Route


class OwnRoute(Route):
    """One `method` of a path. `body` is the type of its JSON body, of which `example` is one.

    `annotations` are those that its requests may have, `tells` the headers of Plait's that its answers may have; None:
    it has nothing to do with calls.
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
        annotations: Collection[str] | None = None,
        tells: Collection[str] = (),
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method = method
        self.summary = summary
        self.body = body
        self.example = example
        self.annotations = annotations
        self.tells = tells
