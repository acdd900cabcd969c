"""`/v1/chat/completions` and `/v1/completions`: a request is one call, alone or chained to others.

A plain ASGI callable, since these two routes are the data path. Starlette serves all other routes (`app`).
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from starlette.types import Receive, Scope, Send

from plait.backends.errors import MethodNotAllowedError, PlaitError
from plait.backends.protocol.openai import check_request, parse_request
from plait.gateway.api.auth import KeyRing
from plait.gateway.api.metrics import RefusalMetrics
from plait.gateway.api.open_bodies import OpenBodies
from plait.gateway.asgi import ClientGoneError, Headers, id_of, send_error
from plait.gateway.calls.annotations import NO_ANNOTATIONS, read_annotations
from plait.gateway.calls.call_reader import KINDS, CallReader, Incoming
from plait.gateway.calls.relay import Relay
from plait.gateway.programs.chained_calls import ChainedCalls, HeldRequest
from plait.gateway.timer import loop_time_s

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CompletionApi:
    """The ASGI application of the two routes in `KINDS`."""

    calls: CallReader
    relay: Relay
    chained: ChainedCalls
    keys: KeyRing
    bodies: OpenBodies
    refusals: RefusalMetrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST. Every failure before the first byte becomes an OpenAI error object."""
        headers: Headers = scope["headers"]
        arrived_s = loop_time_s()
        request_id = id_of(headers)
        try:
            tenant = self.keys.check(headers)
            if scope["method"] != "POST":
                raise MethodNotAllowedError(f"{scope['path']} takes POST requests only.")
            with self.bodies.open(tenant) as open_body:
                body = await open_body.read(receive, headers)
                await self._serve(Incoming(scope["path"], headers, body, request_id, arrived_s, tenant), receive, send)
        except ClientGoneError:
            log.info("client gone", request_id=request_id)
        except PlaitError as error:
            log.info("refused", request_id=request_id, status=error.status, code=error.code, message=error.message)
            self.refusals.count(error)
            await send_error(send, error, request_id)

    async def _serve(self, incoming: Incoming, receive: Receive, send: Send) -> None:
        held = None
        try:
            request = parse_request(incoming.body, KINDS[incoming.path])
            self.calls.prompts.check(request)
            annotations = read_annotations(incoming.headers, request.plait)
            if annotations is not NO_ANNOTATIONS and self.chained.takes(incoming, annotations):
                check_request(request)  # now: an engine might do so much later
                held = self.chained.enter(HeldRequest(incoming, request, annotations))
        except PlaitError as error:
            self.chained.refused(incoming, error)
            raise
        if held is not None:
            await self.chained.answer(held, receive, send)
            return
        delivery = await self.calls.read(incoming, request, annotations)
        await self.relay.deliver(delivery, receive, send)
