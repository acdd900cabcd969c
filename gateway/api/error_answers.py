"""Error answers in the form of the client's API: OpenAI's, unless the path belongs to another API.

`ErrorAnswers` has Starlette's exception handlers. They answer errors on unknown paths and on all routes other than
calls.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from plait.backends.errors import CallerError, NotFoundError, PlaitError
from plait.gateway.asgi import ClientGoneError, OnRefused, error_headers
from plait.gateway.calls.routes import CallRoutes


@dataclass(frozen=True, slots=True)
class ErrorAnswers:
    """Answers errors in the form of the API that a path belongs to. `on_refused` is called with each of them."""

    calls: CallRoutes
    on_refused: OnRefused

    @property
    def handlers(self) -> Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]]:
        """By class of error."""
        return {
            PlaitError: self._answer_error,
            HTTPException: self._answer_http_error,
            ClientGoneError: _answer_nobody,
            Exception: _leave_unanswered,
        }

    async def _answer_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, PlaitError)
        self.on_refused(request.scope, error)
        headers = {name.decode(): value.decode("latin-1") for name, value in error_headers(error)}
        body = self.calls.errors_of(request.scope["path"]).body(error)
        return Response(body, status_code=error.status, headers=headers)

    async def _answer_http_error(self, request: Request, error: Exception) -> Response:
        """Answer an error that Starlette raised itself, such as 405 for a method that the path does not take."""
        assert isinstance(error, HTTPException)
        allowed = (error.headers or {}).get("allow")
        ours = CallerError(
            f"{request.method} {request.url.path}: {error.detail}.{f' Use {allowed}.' if allowed else ''}",
            code="method_not_allowed" if error.status_code == 405 else None,
        )
        ours.status = error.status_code
        answer = await self._answer_error(request, ours)
        answer.headers.update(error.headers or {})
        return answer


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    """The client has disconnected: nobody reads the response that Starlette needs."""
    return Response()


class _NoResponse(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""


async def _leave_unanswered(_request: Request, _error: Exception) -> Response:
    """Send nothing for a bug: Starlette raises the exception again, and the outermost middleware answers."""
    return _NoResponse()


_KNOWN: Final = ("/v1/models", "/v1/sessions", "/v1/programs", "/health", "/ready", "/metrics")
"""Paths that are hinted at, beside those of calls."""

ALIKE: Final = 0.8
"""The least similarity for a hint: the ratio of `difflib`, from 0 to 1."""


def probably_meant(path: str, calls: Iterable[str]) -> str | None:
    """The known path that is most similar to an unknown one; None if none is. `calls` are the paths of calls."""
    paths = [*calls, *_KNOWN]
    tidy = re.sub(r"/+", "/", path).rstrip("/").lower()
    tidy = re.sub(r"^(/v1)+(?=/|$)", "/v1", tidy)
    for candidate in (tidy, f"/v1{tidy}", re.sub("^/(openai|api)(?=/)", "", tidy)):
        if candidate in paths and candidate != path:
            return candidate
    named = {known.removeprefix("/v1/"): known for known in paths}  # the part in common would make all alike
    nearest = difflib.get_close_matches(tidy.removeprefix("/v1/"), named, n=1, cutoff=ALIKE)
    return named[nearest[0]] if nearest and named[nearest[0]] != path else None


class UnknownPath(Route):
    """Matches every path, so it has to come after all other routes. `calls` are the paths of calls."""

    def __init__(self, calls: Iterable[str]) -> None:
        super().__init__("/{path:path}", self._answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        self._calls = calls

    async def _answer(self, request: Request) -> Response:
        routes = [route for route in request.app.routes if route is not self]
        partly = [route.methods or () for route in routes if route.matches(request.scope)[0] is Match.PARTIAL]
        if partly:
            raise HTTPException(405, headers={"allow": ", ".join(sorted(set().union(*partly)))})
        path = request.scope["path"]
        meant = probably_meant(path, self._calls)
        hint = "" if meant is None else f" Did you mean {meant}?"
        if path.startswith("/v1/conversations"):
            hint = " There are no stored conversations here. Continue a response with 'previous_response_id'."
        raise NotFoundError(f"Unknown path: {request.method} {request.url.path}.{hint}")


class SlowClientMetrics:
    """Counts clients that the server disconnected because they did not read their answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._dropped = Counter(
            "plait_slow_clients_dropped", "Connections closed because the client did not read", registry=registry
        )

    def dropped(self) -> None:
        self._dropped.inc()
