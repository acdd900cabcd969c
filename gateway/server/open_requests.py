"""The outermost part of a served application: whatever ends a request, its client gets an error of its API's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import GatewayStoppingError, PlaitError
from plait.backends.http.connection import is_event_stream
from plait.gateway.api.error_answers import error_body, error_event
from plait.gateway.asgi import CLIENT, Client, WatchedReceive, id_of, send_error
from plait.gateway.server.served_client import ServedClient

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
        task = asyncio.current_task()
        assert task is not None
        client: Client | None = scope.pop(CLIENT, None)  # a served one knows the scope, which so ends with it
        if isinstance(client, ServedClient):
            client.requests = self
        request = _OpenRequest(receive, client, scope, send, task, self)
        self._open.add(request)
        defect: PlaitError | None = None
        try:
            await self._app(scope, request, request.send)
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


class _OpenRequest(WatchedReceive, eq=False):
    """One request on its way. It is the ASGI receive of the application."""

    scope: Scope  # the request's
    to_client: Send  # the server's
    task: asyncio.Task[Any]  # answers it
    requests: OpenRequests  # all of them
    head: Message | None = None  # the start of the answer, once it was sent
    is_ended: bool = False  # the whole answer was sent
    is_cut: bool = False
    given_id: str | None = None  # once it was asked for

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI's send. It is not a coroutine of its own, because every piece of every stream comes here."""
        if message["type"] == "http.response.start":
            if self.requests.stopping:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            self.head = message
        elif not message.get("more_body", False):
            self.is_ended = True
        return self.to_client(message)

    def is_own(self, send: Send) -> bool:
        """Whether what is sent so goes to this client as it is."""
        return send == self.send

    async def end(self, error: PlaitError) -> None:
        """Answer with the error, or end the stream with it. An answer cut in the middle is left to the server."""
        client = self.client
        headers = None if self.head is None else list(self.head.get("headers", ()))
        if isinstance(client, ServedClient) and client.answer_headers is not None:
            headers, self.is_ended = list(client.answer_headers), client.cycle.response_complete
        if headers is None:
            await send_error(self.to_client, error, self.id, error_body(self.scope["path"], error))
        elif not self.is_ended and is_event_stream(headers):
            await self.to_client({"type": "http.response.body", "body": error_event(self.scope["path"], error)})

    @property
    def id(self) -> str:
        """The client's name for the request, or a new one."""
        if self.given_id is None:
            self.given_id = id_of(self.scope["headers"])
        return self.given_id


def _defect(request_id: str) -> PlaitError:
    message = f"The server has a defect. Report it with the request id {request_id}, or try again."
    return PlaitError(message, code="internal_error")
