"""The guest that answers in OpenAI's Responses API."""

from __future__ import annotations

from plait.gateway.doors import Guest, House
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.responses.background_api import BackgroundApi
from plait.gateway.guests.responses.response_calls import RESPONSE_ROUTES, ResponseCalls
from plait.gateway.guests.responses.response_routes import ResponsesApi
from plait.gateway.guests.responses.stored_responses import ResponseLog, ResponsesCollector, StoredResponses
from plait.gateway.guests.translation.sealed_thoughts import SealedThoughts
from plait.gateway.others import Others, ResponsesHere


class ResponsesGuest(Guest):
    """Offers `StoredResponses`, and says which responses are here. Needs programs and translation."""

    def __init__(self, house: House) -> None:
        kernel, limits = house.kernel, house.kernel.config.sessions
        stored = StoredResponses(limits.max_response_bytes, limits.ttl_s, house.find(ResponseLog))
        kernel.registry.register(ResponsesCollector(house.offer(StoredResponses, stored)))
        background = BackgroundApi(house[ChainedCalls], stored)
        house.offer(ResponsesHere, background)
        calls = ResponseCalls(
            kernel.completions,
            house[SealedThoughts],
            kernel.refusals,
            RESPONSE_ROUTES,
            background,
            house.find(Others) or Others(),
        )
        self.calls = {route: calls for route, _ in RESPONSE_ROUTES.values()}
        self.routes = ResponsesApi(background, kernel.keys, kernel.bodies).routes
