"""The calls of OpenAI's responses, which may continue a stored one, be stored, or be generated in the background."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from starlette.types import Receive

from plait.backends.translation.fields import InexpressibleError
from plait.backends.translation.translation import TRANSLATIONS
from plait.gateway.api.call_api import Answer, answered, as_forwarded
from plait.gateway.asgi import ClientGoneError, ClientSink, check_client
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.routes import CallRoute
from plait.gateway.guests.responses.background_api import BECOMES_CHAT, BackgroundApi
from plait.gateway.guests.responses.background_call import RESPONSES_PATH
from plait.gateway.guests.responses.responses_api import ContinuedAnswer, KeptResponse, continued, input_items, referred
from plait.gateway.guests.translation.translated_api import AskedBody, TranslatedApi, TranslatedRoute
from plait.gateway.guests.translation.typed_answers import RESPONSE, RESPONSE_TOKENS
from plait.gateway.intake.open_bodies import OpenBody
from plait.gateway.others import Others

Fields = dict[str, Any]

INPUT_TOKENS_PATH: Final = "/v1/responses/input_tokens"

RESPONSE_ROUTES: Final[Mapping[str, TranslatedRoute]] = {
    route.path: TranslatedRoute(route, TRANSLATIONS[RESPONSES_PATH])
    for route in (
        CallRoute(
            RESPONSES_PATH,
            RESPONSE,
            "Answer in OpenAI's Responses API",
            {"model": "demo", "input": "Say hello.", "max_output_tokens": 16},
            has_websocket=True,
        ),
        CallRoute(
            INPUT_TOKENS_PATH,
            RESPONSE_TOKENS,
            "Count the tokens of a response's input",
            {"model": "demo", "input": "Say hello."},
            computes=False,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ResponseCalls(TranslatedApi):
    """Stores the responses of `/v1/responses`, as OpenAI does, so that later requests can continue them.

    They may be in another gateway (`others`), or be generated in the `background`.
    """

    background: BackgroundApi
    others: Others

    async def prepared(self, incoming: Incoming, body: OpenBody, receive: Receive, sink: ClientSink) -> Answer:
        """As in `Preparer`."""
        asked = await self.read(incoming, body)
        previous, stored = asked.given.get("previous_response_id"), self.background.stored
        holder = await self._holder(asked.incoming, previous)
        if holder is not None:
            check_client(receive)
            with suppress(ClientGoneError):  # the other gateway logs the call
                await self.others.forward(holder, as_forwarded(asked.incoming), receive, sink.send)
            return answered
        own = self.opened(asked)
        is_counted_only = incoming.path == INPUT_TOKENS_PATH
        if not is_counted_only and not stored.stores:
            own = {**own, "store": False}
        own = await referred(stored, body, own)
        if asked.given.get("background") and not is_counted_only:
            return await self._in_background(asked, own, body, receive=receive, sink=sink)
        fields = await continued(stored, body, own)
        if is_counted_only:
            return await self.called(asked, fields, body, receive=receive, sink=sink)
        if own.get("store") is not False:
            sink = KeptResponse(sink, stored, asked.incoming.tenant, own.get("previous_response_id"), input_items(own))
        passed = sink if fields is own else ContinuedAnswer(sink, str(previous))  # the engine does not get the id
        return await self.called(asked, fields, body, receive=receive, sink=sink, own=passed)

    async def _holder(self, incoming: Incoming, previous: object) -> str | None:
        """The other gateway that has the response that a request continues; None if this or no gateway has it."""
        stored = self.background.stored
        if not isinstance(previous, str) or self.others.is_alone or stored.has(incoming.tenant, previous):
            return None
        path = f"{RESPONSES_PATH}/{quote(previous, safe='')}"
        return await self.others.holder(stored.stream(incoming.tenant, previous), path, incoming.headers)

    async def _in_background(
        self, asked: AskedBody, own: Fields, body: OpenBody, *, receive: Receive, sink: ClientSink
    ) -> Answer:
        """Begin a background response, which is generated even if its client does not wait."""
        background, fields = self.background, await continued(self.background.stored, body, own)
        try:
            owner = background.begin(asked.incoming, asked.annotations, own, fields)
        except InexpressibleError as error:
            raise error.because(BECOMES_CHAT) from None
        return partial(background.answer, owner, asked.incoming, receive, sink)
