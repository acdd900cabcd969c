"""The requests that are being answered. When the gateway has to stop, each of them that is left gets an error."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from contextlib import suppress

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import GatewayStoppingError
from plait.gateway.asgi import header, is_event_stream, send_error

LAST_WORD_S = 1.5
"""The longest time that an error may take to be sent at the end, to a client that reads slowly."""

log = structlog.get_logger(__name__)


class OpenRequests:
    """ASGI middleware around the whole gateway.

    While `stopping`, each answer closes its connection, so that clients connect elsewhere.
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
        try:
            await self._app(scope, receive, request.send)
        except asyncio.CancelledError:
            if not request.is_cut:
                raise
        finally:
            self._open.discard(request)
        if request.is_cut:
            request.task.uncancel()
            await request.say_stopping()

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
    """One request on its way. `head` is the start of its answer, once that was sent."""

    __slots__ = ("_all", "_ended", "_scope", "_send", "head", "is_cut", "task")

    def __init__(self, requests: OpenRequests, scope: Scope, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.head: Message | None = None
        self.is_cut = False
        self._ended = False
        self._scope = scope
        self._send = send
        self._all = requests

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI's send. It is not a coroutine of its own, because every piece of every stream comes here."""
        if message["type"] == "http.response.start":
            if self._all.stopping:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            self.head = message
        elif not message.get("more_body", False):
            self._ended = True
        return self._send(message)

    async def say_stopping(self) -> None:
        """Tell the client that there will be no answer, unless it has one."""
        if self._ended:
            return
        error = GatewayStoppingError()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                if self.head is None:
                    request_id = header(self._scope["headers"], b"x-request-id") or uuid.uuid4().hex
                    await send_error(self._send, error, request_id)
                elif is_event_stream(self.head["headers"]):
                    await self._send({"type": "http.response.body", "body": b"data: %b\n\n" % error.body()})
