"""The routes of OpenAI's responses and Anthropic's messages: forwarded to engines that have them, or translated.

A response may continue a stored one, be stored, or be generated in the background.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import msgspec
from starlette.types import Receive

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, decode_body, parse_request
from plait.backends.translation.fields import ENGINE_SPEAKS_CHAT, InexpressibleError
from plait.backends.translation.messages_request import BUDGET
from plait.backends.translation.translation import TRANSLATIONS, Translation
from plait.gateway.api.background_api import BECOMES_CHAT, BackgroundApi
from plait.gateway.api.call_api import Answer, CompletionApi, parsed
from plait.gateway.api.owned_sessions import answered, as_forwarded
from plait.gateway.api.refusals import Refusals
from plait.gateway.api.responses_api import KeptResponse, continued, input_items, referred
from plait.gateway.api.rewritten_answer import ContinuedAnswer, TranslatedAnswer
from plait.gateway.asgi import ClientGoneError, ClientSink, check_client
from plait.gateway.calls.annotations import Annotations, read_annotations
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.routes import (
    CHAT_PATH,
    COUNT_PATH,
    INPUT_TOKENS_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    ROUTES,
    CallRoute,
    ForwardedRequest,
)
from plait.gateway.calls.sealed_thoughts import MARK, SealedThoughts
from plait.gateway.calls.stored_responses import StoredResponses
from plait.gateway.intake.open_bodies import OpenBody
from plait.gateway.peers.forwarding import Forwarding

Fields = dict[str, Any]

TRANSLATED: Final[Mapping[str, Translation]] = {
    RESPONSES_PATH: TRANSLATIONS[RESPONSES_PATH],
    INPUT_TOKENS_PATH: TRANSLATIONS[RESPONSES_PATH],
    MESSAGES_PATH: TRANSLATIONS[MESSAGES_PATH],
    COUNT_PATH: TRANSLATIONS[MESSAGES_PATH],
}
"""The translation of each route that `TranslatedApi` serves."""

_RESPONSES: Final = frozenset((RESPONSES_PATH, INPUT_TOKENS_PATH))
"""The routes whose bodies may continue a stored response."""

_SEAL: Final = MARK.encode()

_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)


@dataclass(frozen=True, slots=True)
class TranslatedApi:
    """Serves the APIs that can be translated: forwards their requests, or translates them to chats of this gateway.

    `stored` keeps the responses of `/v1/responses`, as OpenAI does, so that later requests can continue them. They may
    be in another gateway (`forwarding`), or be generated in the background.
    """

    completions: CompletionApi
    stored: StoredResponses
    thoughts: SealedThoughts
    forwarding: Forwarding
    background: BackgroundApi
    refusals: Refusals

    async def prepared(self, incoming: Incoming, body: OpenBody, receive: Receive, sink: ClientSink) -> Answer:
        """As in `Preparer`."""
        route, turns = ROUTES[incoming.path], body.bodies.turns
        translation = TRANSLATED[incoming.path]
        incoming, request = parsed(incoming, ForwardedRequest)
        annotations = read_annotations(incoming.headers, request.plait, request.service_tier)
        if not route.computes:
            route.check(annotations)

        async def go_on() -> None:
            await turns.go_on(incoming.tenant, body.size)

        given = decode_body(incoming.body, _FIELDS)
        await go_on()
        holder = await self._holder(incoming, given.get("previous_response_id"))
        if holder is not None:
            check_client(receive)
            with suppress(ClientGoneError):  # the other gateway logs the call
                await self.forwarding.forward(holder, as_forwarded(incoming), receive, sink.send)
            return answered
        told = given if incoming.body.find(_SEAL) < 0 else self.thoughts.opened(incoming.tenant, given)
        previous, own = given.get("previous_response_id"), await self._referred(incoming, body, told)
        if given.get("background") and incoming.path == RESPONSES_PATH:
            return await self._in_background(incoming, annotations, own, body=body, receive=receive, sink=sink)
        fields, sink = await self._conversation(incoming, body, own, sink)
        await go_on()
        reason = self._reason_to_translate(route, request, annotations)
        if reason is not None:
            try:
                return await self._translated(incoming, translation, fields, receive, sink)
            except InexpressibleError as error:
                raise error.because(reason) from None
        chat = await _chat(translation, fields, go_on) if route.computes else None
        await go_on()
        if fields is not given:  # engines do not have the stored responses, so they get the whole conversation
            whole = {name: value for name, value in fields.items() if name != "previous_response_id"}
            incoming = msgspec.structs.replace(incoming, body=msgspec.json.encode(whole))
        if fields is not own and route.computes:
            sink = ContinuedAnswer(sink, str(previous))  # the engine did not get the id
        asked = await self.completions.calls.forwarded(incoming, request, route, annotations, chat=chat)
        check_client(receive)
        return partial(self.completions.deliver, asked, receive, sink)

    async def _holder(self, incoming: Incoming, previous: object) -> str | None:
        """The other gateway that has the response that a request continues; None if this or no gateway has it."""
        forwarding = self.forwarding
        if incoming.path not in _RESPONSES or not isinstance(previous, str) or forwarding.is_alone:
            return None
        if self.stored.has(incoming.tenant, previous):
            return None
        stream, path = self.stored.stream(incoming.tenant, previous), f"{RESPONSES_PATH}/{quote(previous, safe='')}"
        return await forwarding.holder(stream, path, incoming.headers)

    async def _referred(self, incoming: Incoming, body: OpenBody, given: Fields) -> Fields:
        """The fields, with each reference to a stored item replaced by the item, and `store` false if nothing is."""
        if incoming.path == RESPONSES_PATH and not self.stored.stores:
            given = {**given, "store": False}
        return await referred(self.stored, body, given) if incoming.path in _RESPONSES else given

    async def _conversation(
        self, incoming: Incoming, body: OpenBody, given: Fields, sink: ClientSink
    ) -> tuple[Fields, ClientSink]:
        """The fields with the whole conversation as `input`, and a sink that stores the response.

        Without a conversation, the fields are unchanged. With `store` false, the sink is unchanged.
        """
        if incoming.path not in _RESPONSES:
            return given, sink
        fields = await continued(self.stored, body, given)
        if given.get("store") is False or incoming.path != RESPONSES_PATH:
            return fields, sink
        previous = given.get("previous_response_id")
        return fields, KeptResponse(sink, self.stored, incoming.tenant, previous, input_items(given))

    async def _in_background(
        self,
        incoming: Incoming,
        annotations: Annotations,
        own: Fields,
        *,
        body: OpenBody,
        receive: Receive,
        sink: ClientSink,
    ) -> Answer:
        """Begin a background response, which is generated even if its client does not wait."""
        background, fields = self.background, await continued(self.stored, body, own)
        try:
            owner = background.begin(incoming, annotations, own, fields)
        except InexpressibleError as error:
            raise error.because(BECOMES_CHAT) from None
        return partial(background.answer, owner, incoming, receive, sink)

    def _reason_to_translate(self, route: CallRoute, request: ForwardedRequest, annotations: Annotations) -> str | None:
        """Why a request has to be translated to a chat completion; None: the engines' own route serves it."""
        calls = self.completions.calls
        models = calls.router.models
        model = models.check(request.model)
        if not models.all_have(model, route.path):
            return ENGINE_SPEAKS_CHAT
        if not annotations.is_label:
            return "a call with inputs, an output or a condition becomes a chat completion"
        if calls.isolate_tenants and route.computes and models.lack_field(model, route.path, "cache_salt"):
            return f"tenants are isolated here, and {route.path} of an engine takes no 'cache_salt'"
        return None

    async def _translated(
        self, incoming: Incoming, translation: Translation, fields: Fields, receive: Receive, sink: ClientSink
    ) -> Answer:
        """Translate a request to a chat completion, read that, and return the function that answers the request."""
        if not ROUTES[incoming.path].computes:
            prompt = parse_request(msgspec.json.encode(translation.to_count(fields)), ChatRequest)
            answer = translation.counted(await self.completions.calls.count(incoming, prompt))
            return partial(self._counted, incoming, answer, sink)
        asked, ignored = translation.to_chat(fields), translation.ignored(fields)
        models = self.completions.calls.router.models
        is_ours = BUDGET in asked and BUDGET not in fields
        if is_ours and not models.budget_thoughts(models.check(asked.get("model", ""))):
            del asked[BUDGET]
            ignored.append("thinking.budget_tokens")
        translator = translation.answer(fields, partial(self.thoughts.seal, incoming.tenant))
        told = TranslatedAnswer(sink, translator, ROUTES[incoming.path].form.errors, ignored)
        chat = msgspec.structs.replace(incoming, path=CHAT_PATH, body=msgspec.json.encode(asked), is_translated=True)
        return await self.completions.prepared(chat, None, receive, told, told.expect_prompt)

    async def _counted(self, incoming: Incoming, answer: bytes, sink: ClientSink) -> None:
        self.refusals.no_call(incoming, None)
        headers = [(b"content-type", b"application/json"), (b"x-request-id", incoming.request_id.encode("latin-1"))]
        sink.whole(200, headers, answer)
        await sink.flush()


async def _chat(translation: Translation, fields: Fields, go_on: Callable[[], Awaitable[None]]) -> ChatRequest | None:
    """The chat that an engine would make of a request, to compute its tokens here; None if there is no translation."""
    try:
        body = msgspec.json.encode(translation.to_chat(fields))
        await go_on()
        return parse_request(body, ChatRequest)
    except CallerError:
        return None
