"""The outermost ASGI middleware: however a request ends, its client gets an error in the form of its API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import GatewayStoppingError, PlaitError
from plait.backends.http.content_types import is_event_stream
from plait.backends.protocol.api_errors import COMPLETION_ERRORS, ApiErrors
from plait.gateway.asgi import OnEnd, OnRefused, id_of, send_error, write_error
from plait.gateway.server.served_request import Framing, ServedReceive, ServedRequest, Stage

LAST_WORD_S = 1.5
"""The longest time to send a final error to a client that reads slowly."""

log = structlog.get_logger(__name__)


class Cancellable(Protocol):
    """What answers a request: a task, or an object that the application has returned."""

    def cancel(self) -> object: ...


Begin = Callable[[Scope, bytes, ServedRequest, OnEnd, Callable[[], object]], Cancellable | None]


class OpenRequests:
    """ASGI middleware around a whole application, with the list of all requests that are being answered.

    A bug is logged once, with its traceback. While `stopping`, each answer closes its connection, so that clients
    connect elsewhere. `on_refused` is called with the errors that this middleware answers, and `errors_of` says how
    those of a path are written. Under another ASGI server, that server has to end requests and broken streams itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_refused: OnRefused = lambda _scope, _error: None,
        errors_of: Callable[[str], ApiErrors] = lambda _path: COMPLETION_ERRORS,
    ) -> None:
        self.stopping = False
        self._on_refused = on_refused
        self._errors_of = errors_of
        self._app = app
        self._begin: Begin | None = getattr(app, "begin", None)
        self._open: dict[ServedRequest, Cancellable | None] = {}

    def begin(self, request: ServedRequest) -> bool:
        """Answer a request without a task, if the application can. False: call the application by ASGI."""
        request.requests = self
        if self._begin is None or (body := request.take_body()) is None:
            return False
        self._open[request] = None
        try:
            on_end, in_task = partial(self._ended, request), partial(self._in_task, request, body)
            begun = self._begin(request.scope, body, request, on_end, in_task)
        except Exception as error:  # noqa: BLE001 - a bug is answered with an error, and the connection goes on
            self._ended(request, error)
            return True
        if request in self._open:  # not ended within `_begin`
            self._open[request] = begun
            if begun is None:
                del self._open[request]
                request.give_back(body)
                return False
        return True

    def _ended(self, request: ServedRequest, error: BaseException | None) -> None:
        """A request without a task has ended; `error` is set if a bug ended it."""
        self._open.pop(request, None)
        if error is not None:
            self._tell(request, _defect(request.scope, error))

    def _in_task(self, request: ServedRequest, body: bytes) -> None:
        """A request that was begun without a task needs one after all."""
        self._open.pop(request, None)
        request.give_back(body)
        request.line.answer_in_task(request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif isinstance(receive, ServedReceive):
            await self._answer(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    async def _answer(self, scope: Scope, receive: ServedReceive, send: Send) -> None:
        """Have the application answer a request of Plait's server, in this task."""
        task, request = asyncio.current_task(), receive.client
        assert task is not None
        fault: PlaitError | None = None
        request.requests = self
        self._open[request] = task
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # by `cut`, or by a server that stops at once
            fault = GatewayStoppingError()
        except PlaitError as error:  # the application raises it only after an answer has begun
            fault = error
        except Exception as error:  # noqa: BLE001 - as above
            # Starlette wraps an error that it cannot answer any more, as an answer has begun.
            cause = error.__cause__ if isinstance(error, RuntimeError) else None
            fault = cause if isinstance(cause, PlaitError) else _defect(scope, error)
        if self._open.pop(request, None) is None:  # `cut` has removed it
            fault = fault or GatewayStoppingError()
        elif fault is None and request.stage is Stage.SERVED and not request.is_gone:
            fault = _defect(scope, RuntimeError("the application has not answered"))
        if task.cancelling():
            task.uncancel()
        if fault is None:
            return
        self._on_refused(scope, fault)
        if request.answer_headers is not None:
            self._tell(request, fault)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await send_error(send, fault, id_of(scope), self._errors_of(scope["path"]).body(fault))

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer a request of another server. Answers only bugs before the answer has begun."""
        has_begun = False

        def sent(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            has_begun = True
            return send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:
            if has_begun:
                raise
            fault = _defect(scope, error)
            self._on_refused(scope, fault)
            await send_error(send, fault, id_of(scope), self._errors_of(scope["path"]).body(fault))

    def cut(self) -> int:
        """End every request: with a 503, or if its stream has begun, with an error event. Returns how many."""
        left, self._open = self._open, {}
        for request, answers in left.items():
            try:
                if answers is not None:
                    answers.cancel()
            except Exception as error:  # noqa: BLE001 - the other requests have to end, too
                _defect(request.scope, error)
            if not isinstance(answers, asyncio.Task):  # a cancelled task answers in `_answer`
                self._tell(request, GatewayStoppingError())
        if left:
            log.warning("requests cut: the gateway is stopping", requests=len(left))
        return len(left)

    def _tell(self, request: ServedRequest, error: PlaitError) -> None:
        """Answer with the error, or end the stream with an error event. Otherwise close the connection."""
        path = request.scope["path"]
        if request.answer_headers is None:
            write_error(request, error, id_of(request.scope), self._errors_of(path).body(error))
        elif request.stage is Stage.ANSWERING:
            if is_event_stream(request.answer_headers):
                request.end(self._errors_of(path).event(error))
            elif request.framing is Framing.CLOSE:  # without a length, an orderly close would mean a whole answer
                request.line.transport.abort()
            else:
                request.line.transport.close()


def _defect(scope: Scope, error: BaseException) -> PlaitError:
    """Log a bug. Returns the error for the client."""
    log.error("defect", request_id=id_of(scope), method=scope["method"], path=scope["path"], exc_info=error)
    message = f"The server has a defect. Report it with the request id {id_of(scope)}, or try again."
    return PlaitError(message, code="internal_error")
