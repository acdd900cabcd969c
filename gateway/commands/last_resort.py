"""The outermost part of a served application: whatever ends a request, its client gets an error of OpenAI's shape."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import GatewayStoppingError, PlaitError
from plait.gateway.asgi import header, is_event_stream, send_error

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Answer:
    """How far the answer has come. `is_stream` is True if it is made of server-sent events."""

    raw_send: Send
    started: bool = False
    complete: bool = False
    is_stream: bool = False

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI's send. It is not a coroutine of its own, because every piece of every stream comes here."""
        if message["type"] == "http.response.start":
            self.started = True
            self.is_stream = is_event_stream(list(message.get("headers", ())))
        else:
            self.complete = not message.get("more_body", False)
        return self.raw_send(message)

    async def end(self, error: PlaitError, request_id: str) -> None:
        """Answer with the error, or end the stream with it. An answer cut in the middle is left to uvicorn."""
        if not self.started:
            await send_error(self.raw_send, error, request_id)
        elif self.is_stream and not self.complete:
            await self.raw_send({"type": "http.response.body", "body": b"data: %b\n\n" % error.body()})


class LastResort:
    """An ASGI application that wraps another. It logs a defect once, with its traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:  # only a server that stops cancels a request
            error = GatewayStoppingError()
            await answer.end(error, _request_id(scope))
        except Exception:
            request_id = _request_id(scope)
            log.exception("defect", request_id=request_id, method=scope["method"], path=scope["path"])
            message = f"The server has a defect. Report it with the request id {request_id}, or try again."
            await answer.end(PlaitError(message, code="internal_error"), request_id)


def _request_id(scope: Scope) -> str:
    return header(scope["headers"], b"x-request-id") or uuid.uuid4().hex
