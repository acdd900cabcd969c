"""All routes of calls, the guests' included."""

from __future__ import annotations

from typing import Final

from plait.gateway.calls.routes import ROUTES as OF_THE_KERNEL
from plait.gateway.calls.routes import CallRoutes
from plait.gateway.guests.forms.multipart_api import FORMS
from plait.gateway.guests.responses.response_calls import RESPONSE_ROUTES
from plait.gateway.guests.translation.translated_api import MESSAGE_ROUTES

TRANSLATED: Final = {**MESSAGE_ROUTES, **RESPONSE_ROUTES}
"""Those that may be translated."""

ROUTES: Final = CallRoutes({**OF_THE_KERNEL, **{path: route for path, (route, _) in TRANSLATED.items()}, **FORMS})
