"""The outermost part of a served application: whatever ends a request, its client gets an error of its API's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import GatewayStoppingError, PlaitError
from plait.gateway.api.error_answers import error_body, error_event
from plait.gateway.asgi import id_of, is_event_stream, send_error

LAST_WORD_S = 1.5
"""The longest time that an error may take to be sent at the end, to a client that reads slowly."""

log = structlog.get_logger(__name__)


class OpenRequests:
    """ASGI middleware around a whole application: the requests that are being answered.

    A defect is logged once, with its traceback. While `stopping`, each answer closes its connection, so that clients
    connect elsewhere.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.stopping = False
        self._app = app
        self._open: set[_OpenRequest] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _OpenRequest(self, scope, send)
        self._open.add(request)
        defect: PlaitError | None = None
        try:
            await self._app(scope, receive, request.send)
        except asyncio.CancelledError:  # by `cut`, or by a server that stops at once
            request.is_cut = True
        except Exception:
            log.exception("defect", request_id=request.id, method=scope["method"], path=scope["path"])
            defect = _defect(request.id)
        finally:
            self._open.discard(request)
        if defect is not None:
            await request.end(defect)
        elif request.is_cut:
            request.task.uncancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await request.end(GatewayStoppingError())

    def cut(self) -> int:
        """End every request: with a 503, or a stream that has begun with an error event. Returns how many."""
        left = [request for request in self._open if not request.is_cut]
        for request in left:
            request.is_cut = True
            request.task.cancel()
        if left:
            log.warning("requests cut: the gateway is stopping", requests=len(left))
        return len(left)


class _OpenRequest:
    """One request on its way."""

    __slots__ = ("_all", "_head", "_id", "_is_ended", "_scope", "_send", "is_cut", "task")

    def __init__(self, requests: OpenRequests, scope: Scope, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.is_cut = False
        self._all = requests
        self._head: Message | None = None  # the start of the answer, once it was sent
        self._id: str | None = None
        self._is_ended = False
        self._scope = scope
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI's send. It is not a coroutine of its own, because every piece of every stream comes here."""
        if message["type"] == "http.response.start":
            if self._all.stopping:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            self._head = message
        elif not message.get("more_body", False):
            self._is_ended = True
        return self._send(message)

    async def end(self, error: PlaitError) -> None:
        """Answer with the error, or end the stream with it. An answer cut in the middle is left to the server."""
        if self._head is None:
            await send_error(self._send, error, self.id, error_body(self._scope["path"], error))
        elif not self._is_ended and is_event_stream(list(self._head.get("headers", ()))):
            await self._send({"type": "http.response.body", "body": error_event(self._scope["path"], error)})

    @property
    def id(self) -> str:
        """The client's name for the request, or a new one."""
        if self._id is None:
            self._id = id_of(self._scope["headers"])
        return self._id


def _defect(request_id: str) -> PlaitError:
    message = f"The server has a defect. Report it with the request id {request_id}, or try again."
    return PlaitError(message, code="internal_error")
