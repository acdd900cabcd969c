"""The routes of an API that can be translated: forwarded to engines that have them, or translated to chats.

Anthropic's messages are here; OpenAI's responses, which may be stored, are in `gateway/guests/responses`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import Receive

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, decode_body, parse_request
from plait.backends.translation.fields import ENGINE_SPEAKS_CHAT, InexpressibleError
from plait.backends.translation.messages_request import BUDGET
from plait.backends.translation.translation import COUNT_PATH, TRANSLATIONS, Translation
from plait.gateway.api.call_api import Answer, CompletionApi, parsed
from plait.gateway.api.refusals import Refusals
from plait.gateway.asgi import ClientSink, ClientStage, Headers, check_client
from plait.gateway.calls.annotations import Annotations, read_annotations
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.routes import CHAT_PATH, MESSAGES, CallRoute, ForwardedRequest
from plait.gateway.guests.translation.rewritten_answer import TranslatedAnswer
from plait.gateway.guests.translation.sealed_thoughts import MARK, SealedThoughts
from plait.gateway.guests.translation.typed_answers import MESSAGE, MESSAGE_TOKENS
from plait.gateway.intake.open_bodies import OpenBody

Fields = dict[str, Any]

MESSAGES_PATH: Final = "/v1/messages"

_SEAL: Final = MARK.encode()
_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)


class NamedAnswer(ClientStage):
    """Names the request as Anthropic's API does."""

    def __init__(self, to: ClientSink, request_id: str) -> None:
        super().__init__(to)
        self._name = b"request-id", request_id.encode("latin-1")

    def head(self, headers: Headers) -> Headers:
        return [*headers, self._name]


class TranslatedRoute(NamedTuple):
    route: CallRoute
    translation: Translation


MESSAGE_ROUTES: Final = {
    route.path: TranslatedRoute(route, TRANSLATIONS[MESSAGES_PATH])
    for route in (
        CallRoute(
            MESSAGES_PATH,
            MESSAGE,
            "Answer in Anthropic's Messages API",
            {"model": "demo", "messages": MESSAGES, "max_tokens": 16},
            names_answer=NamedAnswer,
            owns_below=True,
        ),
        CallRoute(
            COUNT_PATH,
            MESSAGE_TOKENS,
            "Count the tokens of a message",
            {"model": "demo", "messages": MESSAGES},
            computes=False,
        ),
    )
}


class AskedBody(NamedTuple):
    """A request whose body and annotations are read; `given` are the body's fields."""

    incoming: Incoming
    request: ForwardedRequest
    annotations: Annotations
    given: Fields


@dataclass(frozen=True, slots=True)
class TranslatedApi:
    """Serves `routes`: forwards their requests, or translates them to chats of this gateway."""

    completions: CompletionApi
    thoughts: SealedThoughts
    refusals: Refusals
    routes: Mapping[str, TranslatedRoute]

    async def prepared(self, incoming: Incoming, body: OpenBody, receive: Receive, sink: ClientSink) -> Answer:
        """As in `Preparer`."""
        asked = await self.read(incoming, body)
        return await self.called(asked, self.opened(asked), body, receive=receive, sink=sink)

    async def read(self, incoming: Incoming, body: OpenBody) -> AskedBody:
        """Read a request. Raises `PlaitError`."""
        route = self.routes[incoming.path].route
        incoming, request = parsed(incoming, ForwardedRequest)
        annotations = read_annotations(incoming.headers, request.plait, request.service_tier)
        if not route.computes:
            route.check(annotations)
        given = decode_body(incoming.body, _FIELDS)
        await body.bodies.turns.go_on(incoming.tenant, body.size)
        return AskedBody(incoming, request, annotations, given)

    def opened(self, asked: AskedBody) -> Fields:
        """The fields, with the tenant's own sealed thoughts as texts."""
        has_seal = asked.incoming.body.find(_SEAL) >= 0
        return self.thoughts.opened(asked.incoming.tenant, asked.given) if has_seal else asked.given

    async def called(
        self,
        asked: AskedBody,
        fields: Fields,
        body: OpenBody,
        *,
        receive: Receive,
        sink: ClientSink,
        own: ClientSink | None = None,
    ) -> Answer:
        """The call of a request with these `fields`. `own` is the sink for an answer of the engine's own route.

        None: the same. Raises as `prepared` does.
        """
        incoming, request, annotations, given = asked
        route, translation = self.routes[incoming.path]
        turns = body.bodies.turns

        async def go_on() -> None:
            await turns.go_on(incoming.tenant, body.size)

        await go_on()
        reason = self._reason_to_translate(route, request, annotations)
        if reason is not None:
            try:
                return await self._translated(incoming, route, translation, fields, receive=receive, sink=sink)
            except InexpressibleError as error:
                raise error.because(reason) from None
        chat = await _chat(translation, fields, go_on) if route.computes else None
        await go_on()
        if fields is not given:  # engines do not have the stored responses, so they get the whole conversation
            whole = {name: value for name, value in fields.items() if name != "previous_response_id"}
            incoming = msgspec.structs.replace(incoming, body=msgspec.json.encode(whole))
        call = await self.completions.calls.forwarded(incoming, request, route, annotations, chat=chat)
        check_client(receive)
        return partial(self.completions.deliver, call, receive, own or sink)

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
        self,
        incoming: Incoming,
        route: CallRoute,
        translation: Translation,
        fields: Fields,
        *,
        receive: Receive,
        sink: ClientSink,
    ) -> Answer:
        """Translate a request to a chat completion, read that, and return the function that answers the request."""
        if not route.computes:
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
        told = TranslatedAnswer(sink, translator, route.form.errors, ignored)
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
