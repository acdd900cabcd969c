"""`/v1/chat/completions` and `/v1/completions`, the routes that the gateway speaks itself."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Receive, Send

from plait.backends.errors import PlaitError
from plait.backends.protocol.openai import check_request, parse_request
from plait.gateway.calls.annotations import NO_ANNOTATIONS, read_annotations
from plait.gateway.calls.call_reader import CallReader, Incoming
from plait.gateway.calls.relay import Relay
from plait.gateway.calls.routes import KINDS
from plait.gateway.programs.chained_calls import ChainedCalls, HeldRequest


@dataclass(frozen=True, slots=True)
class CompletionApi:
    """Serves completions. A call alone goes to an engine at once, one of a program waits for its inputs."""

    calls: CallReader
    relay: Relay
    chained: ChainedCalls

    async def serve(self, incoming: Incoming, receive: Receive, send: Send) -> None:
        """Answer a request. Raises `PlaitError` before the first byte, and `ClientGoneError`."""
        held = None
        try:
            request = parse_request(incoming.body, KINDS[incoming.path])
            annotations = read_annotations(incoming.headers, request.plait)
            if annotations is not NO_ANNOTATIONS:
                self.calls.prompts.check(request)
                await self.chained.runner.entrance.whole(incoming.tenant, annotations.session)
                if self.chained.takes(incoming, annotations):
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
