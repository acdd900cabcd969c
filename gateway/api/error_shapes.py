"""Errors in the shape of the API that a client speaks: OpenAI's, unless its path is another API's."""

from __future__ import annotations

from plait.backends.errors import PlaitError
from plait.gateway.calls.routes import ROUTES


def error_body(path: str, error: PlaitError) -> bytes:
    """The body of an error."""
    route = ROUTES.get(path)
    return error.body() if route is None or route.translation is None else route.translation.error(error)


def error_event(path: str, error: PlaitError) -> bytes:
    """An error as an event of a stream that has begun."""
    route = ROUTES.get(path)
    if route is None or route.translation is None:
        return b"data: %b\n\n" % error.body()
    return route.translation.error_event(error)
