"""`POST /call_objectives` inside an engine's own API server: the request's body and the answer's form.

See `plait.backends.protocol.call_objectives`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from plait.backends.adapter.asgi import Receive, Scope, Send, read_body, send_answer
from plait.backends.errors import MethodNotAllowedError, PlaitError
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.call_objectives import MAX_BODY_BYTES, PATH, ChangesAnswer, read_changes

Change = Callable[[bytes], Awaitable[int]]
"""Passes a valid body to the scheduler. Returns how many of its calls are known; raises `PlaitError`."""

Access = Callable[[Scope], Change]
"""Checks a request's API key and the engine before the body is read; raises `PlaitError`."""


async def answer(scope: Scope, receive: Receive, send: Send, access: Access) -> None:
    """Answer one request."""
    try:
        if scope["method"] != "POST":
            raise MethodNotAllowedError(f"{PATH} takes POST requests only")
        change = access(scope)
        body = await read_body(receive, MAX_BODY_BYTES)
        read_changes(body, AnnotationReader())
        await send_answer(send, 200, msgspec.json.encode(ChangesAnswer(await change(body))))
    except PlaitError as error:
        await send_answer(send, error.status, error.body())
