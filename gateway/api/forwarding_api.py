"""The routes that engines have besides completions: forwarded as they come, or translated to chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Send

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, decode_body, parse_request
from plait.backends.translation.messages import MessagesTranslation
from plait.backends.translation.translation import Translation
from plait.gateway.api.completion_api import CompletionApi
from plait.gateway.api.kept_response import KeptResponse, continued, input_items
from plait.gateway.api.translated_answer import TranslatedAnswer
from plait.gateway.asgi import send_whole
from plait.gateway.calls.annotations import Annotations, read_annotations
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.routes import CHAT_PATH, COUNT_PATH, RESPONSES_PATH, ROUTES, CallRoute, ForwardedRequest
from plait.gateway.calls.stored_responses import StoredResponses

Fields = dict[str, Any]

_MESSAGES = MessagesTranslation()
_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)


@dataclass(frozen=True, slots=True)
class ForwardingApi:
    """Serves what is no completion, over the completions of the same gateway. Responses are `stored` as OpenAI does."""

    completions: CompletionApi
    stored: StoredResponses

    async def serve(self, incoming: Incoming, receive: Receive, send: Send) -> None:
        """Answer a request. Raises `PlaitError` before the first byte, and `ClientGoneError`."""
        route = ROUTES[incoming.path]
        request = parse_request(incoming.body, ForwardedRequest)
        annotations = read_annotations(incoming.headers, request.plait)
        is_plain, chat = annotations == Annotations(session=annotations.session), None
        if route.translation is not None:
            given = decode_body(incoming.body, _FIELDS)
            fields, send = self._conversation(incoming, given, send)
            if fields is not given or not is_plain or not self._may_forward(route, request, fields):
                await self._translate(incoming, route.translation, fields, receive, send)
                return
            chat = _chat(route.translation, fields) if route.computes else None
        elif not is_plain:
            raise CallerError(f"{route.path} takes no annotations but 'plait-session'.", param="plait")
        delivery = await self.completions.calls.forwarded(incoming, request, route, annotations.session, chat)
        await self.completions.relay.deliver(delivery, receive, send)

    def _conversation(self, incoming: Incoming, given: Fields, send: Send) -> tuple[Fields, Send]:
        """The fields of a response with what was said before it, and a `send` that stores it."""
        if incoming.path != RESPONSES_PATH:
            return given, send
        fields = continued(self.stored, incoming.tenant, given)
        if given.get("store") is False:
            return fields, send
        previous = given.get("previous_response_id")
        return fields, KeptResponse(self.stored, incoming.tenant, previous, input_items(given), send).send

    def _may_forward(self, route: CallRoute, request: ForwardedRequest, fields: Fields) -> bool:
        """Whether each engine has the route, and the gateway has nothing to do to the request.

        A response in the background could only be asked of the engine that has it, so it is left to be refused.
        """
        calls = self.completions.calls
        models = calls.router.models
        has_work = calls.isolate_tenants or fields.get("background")
        return not has_work and models.all_have(models.check(request.model), route.path)

    async def _translate(
        self, incoming: Incoming, translation: Translation, fields: Fields, receive: Receive, send: Send
    ) -> None:
        if incoming.path == COUNT_PATH:
            await self._count(incoming, fields, send)
            return
        body = msgspec.json.encode(translation.to_chat(fields))
        answer = TranslatedAnswer(send, translation, translation.answer(fields))
        await self.completions.serve(msgspec.structs.replace(incoming, path=CHAT_PATH, body=body), receive, answer.send)

    async def _count(self, incoming: Incoming, fields: Fields, send: Send) -> None:
        """Count a message's tokens here, with the model's tokenizer."""
        chat = parse_request(msgspec.json.encode(_MESSAGES.to_count(fields)), ChatRequest)
        answer = _MESSAGES.counted(await self.completions.calls.count(incoming, chat))
        headers = [(b"content-type", b"application/json"), (b"x-request-id", incoming.request_id.encode("latin-1"))]
        await send_whole(send, 200, headers, answer)


def _chat(translation: Translation, fields: Mapping[str, Any]) -> ChatRequest | None:
    """The chat that an engine makes of a request, for its tokens; None if it cannot be told here."""
    try:
        return parse_request(msgspec.json.encode(translation.to_chat(fields)), ChatRequest)
    except CallerError:
        return None
