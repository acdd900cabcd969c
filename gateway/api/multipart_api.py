"""Calls whose bodies are forms with files (`multipart/form-data`).

The gateway reads only the model's name. The engine gets the same bytes, with an alias replaced by its model.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

from starlette.types import Receive

from plait.gateway.asgi import header
from plait.gateway.calls.annotations import read_annotations
from plait.gateway.calls.call import Asked
from plait.gateway.calls.call_reader import CallReader, Incoming
from plait.gateway.calls.multipart_body import Form
from plait.gateway.calls.routes import ROUTES, ForwardedRequest
from plait.gateway.intake.multipart import FormReader
from plait.gateway.intake.open_bodies import OpenBody
from plait.gateway.intake.uploads import Upload

_READ: Final = frozenset((b"model",))
"""The fields of a form that the gateway reads."""


async def read_form(calls: CallReader, incoming: Incoming, body: OpenBody, receive: Receive, upload: Upload) -> Asked:
    """Read a form from `receive` into `upload`, and return the call. Raises `PlaitError`."""
    route = ROUTES[incoming.path]
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
    return await calls.forwarded(incoming, request, route, annotations, form=Form(upload, model))
