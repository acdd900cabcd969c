"""How errors of the routes beside calls are answered: Starlette's exception handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.backends.errors import CallerError, PlaitError
from plait.gateway.api.error_shapes import error_body
from plait.gateway.asgi import ClientGoneError, error_headers


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PlaitError)
    request.app.state.refusals.count(error)
    headers = {name.decode(): value.decode("latin-1") for name, value in error_headers(error)}
    body = error_body(request.scope["path"], error)
    return Response(body, status_code=error.status, headers=headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: a method that the path does not take."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("allow")
    ours = CallerError(
        f"{request.method} {request.url.path}: {error.detail}.{f' Use {allowed}.' if allowed else ''}",
        code="method_not_allowed" if error.status_code == 405 else None,
    )
    ours.status = error.status_code
    answer = await _answer_error(request, ours)
    answer.headers.update(error.headers or {})
    return answer


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response()


class _NoResponse(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""


async def _leave_unanswered(_request: Request, _error: Exception) -> Response:
    """A defect: Starlette raises it again, and the server answers."""
    return _NoResponse()


ANSWERS: Final[Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]]] = {
    PlaitError: _answer_error,
    HTTPException: _answer_http_error,
    ClientGoneError: _answer_nobody,
    Exception: _leave_unanswered,
}
"""By the error's class. `request.app.state.refusals` counts errors."""
