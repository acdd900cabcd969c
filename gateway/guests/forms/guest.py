"""The guest that serves calls whose bodies are forms."""

from __future__ import annotations

from plait.gateway.doors import Guest, House
from plait.gateway.guests.forms.multipart_api import FORMS, FormApi


class FormsGuest(Guest):
    """Offers the `FormApi`. Its calls need nothing of other guests."""

    def __init__(self, house: House) -> None:
        forms = house.offer(FormApi, FormApi(house.kernel.completions))
        self.calls = dict.fromkeys(FORMS.values(), forms)
