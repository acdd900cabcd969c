"""The guest that answers in Anthropic's Messages API, also where engines serve only chats."""

from __future__ import annotations

from plait.gateway.doors import Guest, House
from plait.gateway.guests.translation.sealed_thoughts import SealedThoughts
from plait.gateway.guests.translation.translated_api import MESSAGE_ROUTES, TranslatedApi


class TranslationGuest(Guest):
    """Offers `SealedThoughts`."""

    def __init__(self, house: House) -> None:
        kernel = house.kernel
        thoughts = house.offer(SealedThoughts, SealedThoughts(house.secret))
        messages = TranslatedApi(kernel.completions, thoughts, kernel.refusals, MESSAGE_ROUTES)
        self.calls = {route: messages for route, _ in MESSAGE_ROUTES.values()}
