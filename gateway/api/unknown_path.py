"""Paths that are no routes: the answer names the route that was probably meant."""

from __future__ import annotations

import difflib
import re
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.backends.errors import NotFoundError
from plait.gateway.calls.routes import ROUTES

_KNOWN: Final = (*ROUTES, "/v1/models", "/v1/sessions", "/v1/programs", "/health", "/ready", "/metrics")
ALIKE: Final = 0.8
"""The least likeness of two paths, as `difflib` measures it."""


def probably_meant(path: str) -> str | None:
    """The route that a path without a route is most like; None if it is like none."""
    tidy = re.sub(r"/+", "/", path).rstrip("/").lower()
    tidy = re.sub(r"^(/v1)+(?=/|$)", "/v1", tidy)
    for candidate in (tidy, f"/v1{tidy}", re.sub("^/(openai|api)(?=/)", "", tidy)):
        if candidate in _KNOWN and candidate != path:
            return candidate
    nearest = difflib.get_close_matches(tidy, _KNOWN, n=1, cutoff=ALIKE)
    return nearest[0] if nearest and nearest[0] != path else None


async def _answer(request: Request) -> Response:
    meant = probably_meant(request.scope["path"])
    hint = "" if meant is None else f" Did you mean {meant}?"
    raise NotFoundError(f"Unknown path: {request.method} {request.url.path}.{hint}")


UNKNOWN_PATH: Final = Route("/{path:path}", _answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
"""Comes after all other routes."""
