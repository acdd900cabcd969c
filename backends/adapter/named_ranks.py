"""The header `X-data-parallel-rank` of requests to an engine's API server, on all its routes.

Engines obey the header on some of their routes. `NamedRanks` keeps the rank for whatever a request makes the engine
compute (`named_rank`), and refuses a rank that does not exist. A server with one rank needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from plait.backends.adapter.routes import App, Receive, Scope, Send, read_rank, send_answer
from plait.backends.errors import CallerError
from plait.backends.protocol.dialects import RANK_HEADER

_named: Final[ContextVar[int | None]] = ContextVar("named_rank", default=None)
"""In a request's task, and in the tasks that it begins."""


class NamedRanks:
    """ASGI middleware. `count` returns how many ranks the server has."""

    def __init__(self, app: App, count: Callable[[], int]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"] if scope["type"] == "http" else ()
        value = next((value.decode("latin-1") for name, value in headers if name == RANK_HEADER), None)
        try:
            _named.set(read_rank(value, RANK_HEADER.decode(), self._count()))
        except CallerError as error:
            await send_answer(send, error.status, error.body())
        else:
            await self._app(scope, receive, send)


def named_rank() -> int | None:
    """The rank that the request of this task names."""
    return _named.get()
