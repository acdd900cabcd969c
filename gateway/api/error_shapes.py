"""Errors in the shape of the API that a client speaks: OpenAI's, unless its path is another API's."""

from __future__ import annotations

from plait.backends.errors import PlaitError
from plait.backends.translation.translation import Translation
from plait.gateway.calls.routes import MESSAGES_PATH, ROUTES


def error_body(path: str, error: PlaitError) -> bytes:
    """The body of an error."""
    translation = _translation(path)
    return error.body() if translation is None else translation.error(error)


def error_event(path: str, error: PlaitError) -> bytes:
    """An error as an event of a stream that has begun."""
    translation = _translation(path)
    return b"data: %b\n\n" % error.body() if translation is None else translation.error_event(error)


def _translation(path: str) -> Translation | None:
    """That of the path's API. Anthropic's clients know paths below that of messages which are no routes here."""
    route = ROUTES.get(MESSAGES_PATH if path.startswith(f"{MESSAGES_PATH}/") else path)
    return None if route is None else route.translation
