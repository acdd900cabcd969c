"""Calls whose bodies are forms with files (`multipart/form-data`).

The gateway reads only the model's name. The engine gets the same bytes, with an alias replaced by its model.
"""

from __future__ import annotations

from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.types import Receive

from plait.gateway.answers.other_answers import MEDIA
from plait.gateway.api.call_api import Answer, CompletionApi
from plait.gateway.asgi import ClientSink, check_client, header
from plait.gateway.calls.annotations import read_annotations
from plait.gateway.calls.call import Asked
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.routes import CallRoute, ForwardedRequest
from plait.gateway.guests.forms.multipart import FormReader
from plait.gateway.guests.forms.multipart_body import Form
from plait.gateway.guests.forms.uploads import Upload
from plait.gateway.intake.open_bodies import OpenBody

FORMS: Final = {
    route.path: route
    for route in (
        CallRoute("/v1/images/edits", MEDIA, "Change an image", file="image"),
        CallRoute("/v1/audio/transcriptions", MEDIA, "Write down what is said", file="file"),
        CallRoute("/v1/audio/translations", MEDIA, "Write down in English what is said", file="file"),
    )
}

_READ: Final = frozenset((b"model",))
"""The fields of a form that the gateway reads."""


@dataclass(frozen=True, slots=True)
class FormApi:
    """Makes calls of forms."""

    completions: CompletionApi

    async def prepared(self, incoming: Incoming, body: OpenBody, receive: Receive, sink: ClientSink) -> Answer:
        """As in `Preparer`."""
        with ExitStack() as held:
            asked = await self._read(incoming, body, receive, held.enter_context(Upload()))
            check_client(receive)
            return partial(self._answer, asked, receive, sink, held.pop_all())

    async def _read(self, incoming: Incoming, body: OpenBody, receive: Receive, upload: Upload) -> Asked:
        """Read a form from `receive` into `upload`, and return the call. Raises `PlaitError`."""
        route = FORMS[incoming.path]
        annotations = read_annotations(incoming.headers, None)
        route.check(annotations)
        reader = FormReader(header(incoming.headers, b"content-type") or "", _READ)
        async with aclosing(body.pieces(receive, incoming.headers, body.bodies.max_multipart_bytes)) as pieces:
            async for piece in pieces:
                reader.feed(piece)
                await upload.add(piece)
        reader.end()
        await upload.end()
        model = reader.found.get("model")
        request = ForwardedRequest(model="" if model is None else model.value)
        return await self.completions.calls.forwarded(incoming, request, route, annotations, form=Form(upload, model))

    async def _answer(self, asked: Asked, receive: Receive, sink: ClientSink, held: ExitStack) -> None:
        with held:
            await self.completions.deliver(asked, receive, sink)
