"""The outermost part of a served application: whatever ends a request, its client gets an error of its API's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import GatewayStoppingError, PlaitError
from plait.backends.http.connection import is_event_stream
from plait.gateway.api.error_answers import error_body, error_event
from plait.gateway.asgi import CLIENT, Client, OnEnd, WatchedReceive, id_of, send_error, write_error
from plait.gateway.server.served_client import ServedClient

LAST_WORD_S = 1.5
"""The longest time that an error may take to be sent at the end, to a client that reads slowly."""

log = structlog.get_logger(__name__)


class Cancellable(Protocol):
    """What answers a request."""

    def cancel(self) -> None:
        """Give it up."""


Begin = Callable[[Scope, bytes, ServedClient, OnEnd], Cancellable | None]


class OpenRequests:
    """ASGI middleware around a whole application: the requests that are being answered.

    A defect is logged once, with its traceback. While `stopping`, each answer closes its connection, so that clients
    connect elsewhere.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.stopping = False
        self._app = app
        self._open: set[_OpenRequest] = set()
        self._begin: Begin | None = getattr(app, "begin", None)
        self._begun: dict[ServedClient, tuple[Scope, Cancellable | None]] = {}

    def begin(self, scope: Scope, client: ServedClient) -> bool:
        """Begin to answer a request without a task, if the application can. Else call it as ASGI has it."""
        client.requests = self
        if self._begin is None or (body := client.take_body()) is None:
            return False
        self._begun[client] = scope, None
        try:
            begun = self._begin(scope, body, client, partial(self._ended, scope, client))
        except Exception as error:  # noqa: BLE001 - a defect has to be answered, not to end the connection
            self._ended(scope, client, error)
            return True
        if client in self._begun:  # it has not ended
            self._begun[client] = scope, begun
            if begun is None:
                del self._begun[client]
                client.give_back(body)
                return False
        return True

    def _ended(self, scope: Scope, client: ServedClient, error: BaseException | None) -> None:
        """A request that was begun without a task has ended, perhaps by a defect."""
        self._begun.pop(client, None)
        if error is not None:
            log.error("defect", request_id=id_of(scope), method=scope["method"], path=scope["path"], exc_info=error)
            _tell(client, scope, _defect(scope))

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
        except PlaitError as error:  # of an answer that had begun
            log.info("refused", request_id=id_of(scope), status=error.status, code=error.code, message=error.message)
            defect = error
        except Exception:
            log.exception("defect", request_id=id_of(scope), method=scope["method"], path=scope["path"])
            defect = _defect(scope)
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
        begun, self._begun = self._begun, {}
        for client, (scope, call) in begun.items():
            try:
                if call is not None:
                    call.cancel()
            except Exception:  # the others have to end too
                log.exception("defect", request_id=id_of(scope), method=scope["method"], path=scope["path"])
            _tell(client, scope, GatewayStoppingError())
        cut = len(left) + len(begun)
        if cut:
            log.warning("requests cut: the gateway is stopping", requests=cut)
        return cut


class _OpenRequest(WatchedReceive, eq=False):
    """One request on its way. It is the ASGI receive of the application."""

    scope: Scope  # the request's
    to_client: Send  # the server's
    task: asyncio.Task[Any]  # answers it
    requests: OpenRequests  # all of them
    head: Message | None = None  # the start of the answer, once it was sent
    is_ended: bool = False  # the whole answer was sent
    is_cut: bool = False

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
        """Whether what is sent so goes to this client as it is, and nothing changes it on the way to the server."""
        return send == self.send and isinstance(self.client, ServedClient) and self.to_client == self.client.cycle.send

    @property
    def has_answer(self) -> bool:
        """Whether an answer has begun."""
        client = self.client
        return self.head is not None or (isinstance(client, ServedClient) and client.answer_headers is not None)

    async def end(self, error: PlaitError) -> None:
        """Answer with the error, or end the stream with it. An answer cut in the middle is left to the server."""
        client = self.client
        if isinstance(client, ServedClient) and client.answer_headers is not None:
            _tell(client, self.scope, error)
        elif self.head is None:
            await send_error(self.to_client, error, id_of(self.scope), error_body(self.scope["path"], error))
        elif not self.is_ended and is_event_stream(list(self.head.get("headers", ()))):
            await self.to_client({"type": "http.response.body", "body": error_event(self.scope["path"], error)})


def _tell(client: ServedClient, scope: Scope, error: PlaitError) -> None:
    """Answer with the error, or end the stream with it. A connection closes with an answer cut in the middle."""
    if client.answer_headers is None:
        write_error(client, error, id_of(scope), error_body(scope["path"], error))
    elif not client.cycle.response_complete:
        if is_event_stream(client.answer_headers):
            client.end(error_event(scope["path"], error))
        else:
            client.served.transport.close()


def _defect(scope: Scope) -> PlaitError:
    message = f"The server has a defect. Report it with the request id {id_of(scope)}, or try again."
    return PlaitError(message, code="internal_error")
