"""The routes whose requests are calls: each request is one call, alone or chained to others.

A plain ASGI callable, since these routes are the data path. Starlette serves all other routes (`app`).
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from starlette.types import Receive, Scope, Send

from plait.backends.errors import MethodNotAllowedError, PlaitError
from plait.gateway.api.auth import KeyRing
from plait.gateway.api.completion_api import CompletionApi
from plait.gateway.api.error_shapes import error_body
from plait.gateway.api.forwarding_api import ForwardingApi
from plait.gateway.api.metrics import RefusalMetrics
from plait.gateway.asgi import ClientGoneError, Headers, id_of, send_error
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.open_bodies import OpenBodies
from plait.gateway.calls.routes import KINDS
from plait.gateway.timer import loop_time_s

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CallApi:
    """The ASGI application of the routes in `ROUTES`."""

    completions: CompletionApi
    others: ForwardingApi
    keys: KeyRing
    bodies: OpenBodies
    refusals: RefusalMetrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST. Every failure before the first byte becomes an error object of the route's API."""
        headers: Headers = scope["headers"]
        path, arrived_s = scope["path"], loop_time_s()
        request_id = id_of(headers)
        try:
            tenant = self.keys.check(headers)
            if scope["method"] != "POST":
                raise MethodNotAllowedError(f"{path} takes POST requests only.")
            with self.bodies.open(tenant) as open_body:
                body = await open_body.read(receive, headers)
                incoming = Incoming(path, headers, body, request_id, arrived_s, tenant)
                await (self.completions if path in KINDS else self.others).serve(incoming, receive, send)
        except ClientGoneError:
            log.info("client gone", request_id=request_id)
        except PlaitError as error:
            log.info("refused", request_id=request_id, status=error.status, code=error.code, message=error.message)
            self.refusals.count(error)
            await send_error(send, error, request_id, error_body(path, error))
