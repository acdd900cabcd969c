"""Background responses (`background: true`): generated even if no client waits, and found by their id.

A running response is a session with one call (`background_call.py`). An ended response is in `StoredResponses`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.types import Receive

from plait.backends.errors import CallerError, NotFoundError, PlaitError, SessionEndedError
from plait.backends.protocol.openai import check_request
from plait.backends.translation.answer_translator import Identity, new_identity
from plait.backends.translation.background_turn import PREFIX
from plait.backends.translation.translation import TRANSLATIONS
from plait.gateway.asgi import ClientSink, Headers, unless_gone
from plait.gateway.calls.annotations import Annotations
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.guests.programs.asked_step import AskedStep, RequestPrompt
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.programs.unstored import unstored_headers
from plait.gateway.guests.responses.background_call import (
    RESPONSES_PATH,
    AskedResponse,
    BackgroundCall,
    read_response,
    response_of,
)
from plait.gateway.guests.responses.responses_api import input_items
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.guests.translation.rewritten_answer import ignored_headers
from plait.gateway.ids import SESSION_ID
from plait.gateway.streams import StreamKey
from plait.gateway.timer import loop_time_s

Fields = dict[str, Any]

BECOMES_CHAT: Final = "a response in the background becomes a chat completion"


@dataclass(frozen=True, slots=True)
class BackgroundApi:
    """Begins background responses, and finds the running ones."""

    chained: ChainedCalls
    stored: StoredResponses

    def begin(self, incoming: Incoming, annotations: Annotations, own: Fields, fields: Fields) -> BackgroundCall:
        """Begin a response. Raises `PlaitError`.

        `own` are the request's fields. `fields` are the same, but their `input` has the whole conversation.
        """
        items = input_items(own)
        self.stored.check_background(msgspec.json.encode({**own, "input": items}))
        if fields.get("store") is False:
            message = "A response in the background is stored, so that it can be asked for: leave 'store' out."
            raise CallerError(message, param="store")
        if not annotations.is_label:
            message = "A response in the background takes no inputs, output, condition or objective of a session."
            raise CallerError(message, param="background", code="invalid_annotation")
        identity = self._new_identity(incoming.tenant)
        asked = AskedResponse(fields, items, fields.get("previous_response_id"), identity.created_s)
        step = read_response(incoming, asked)
        assert isinstance(step.prompts, RequestPrompt)
        check_request(step.prompts.request)
        reader = self.chained.runner.reader
        reader.prompts.check(step.prompts.request)
        reader.router.models.check(step.prompts.model)
        return self._added(identity, asked, step, durable=annotations.durable is not False)

    def find(self, tenant: str, response_id: str) -> BackgroundCall | None:
        """The running response with this id; None if there is none. Raises `PlaitError` while the log is being read."""
        if not SESSION_ID.fits(response_id):
            return None
        try:
            session = self.chained.executor.sessions.find(tenant, response_id, loop_time_s())
        except (NotFoundError, SessionEndedError):
            return None
        return response_of(session)

    def has(self, tenant: str, response_id: str) -> bool:
        return self.stored.has(tenant, response_id) or self.chained.executor.sessions.has(tenant, response_id)

    def stream(self, tenant: str, response_id: str) -> StreamKey:
        return self.stored.stream(tenant, response_id)

    async def answer(self, owner: BackgroundCall, incoming: Incoming, receive: Receive, sink: ClientSink) -> None:
        """Answer the request that began a response, after the commit of its session."""
        fields, queued = owner.fields, owner.answer.response
        headers: Headers = [
            (b"x-request-id", incoming.request_id.encode("latin-1")),
            *ignored_headers(TRANSLATIONS[RESPONSES_PATH].ignored(fields)),
        ]
        headers = await owner.once_stored(headers, unstored_headers)
        if fields.get("stream"):
            await unless_gone(receive, owner.answer.follow(sink, headers, 0, self.chained.keep_alive_s))
        else:
            sink.whole(200, [*headers, (b"content-type", b"application/json")], queued)
            await sink.flush()

    def _new_identity(self, tenant: str) -> Identity:
        """A new id of a session that this gateway may create: without a shared store, each gateway owns some ids."""
        while True:
            identity = new_identity()
            if self.chained.executor.sessions.is_own(tenant, f"{PREFIX}{identity.key}"):
                return identity

    def _added(self, identity: Identity, asked: AskedResponse, step: AskedStep, *, durable: bool) -> BackgroundCall:
        executor, incoming = self.chained.executor, step.incoming
        session = executor.sessions.open(
            incoming.tenant, f"{PREFIX}{identity.key}", incoming.arrived_s, durable=durable
        )
        owner = BackgroundCall(self.chained.runner, session, asked, step, self.stored)
        try:
            executor.add(session, owner.call, incoming.arrived_s)
        except PlaitError:
            executor.endings.end(session, "has no call", loop_time_s())
            raise
        return owner
