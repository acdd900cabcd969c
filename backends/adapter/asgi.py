"""What the adapters' routes need of ASGI, inside an engine's own API server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from plait.backends.errors import BodyTooLargeError, CallerError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """The request's whole body. Raises `CallerError` beyond the limit, or if the client has gone."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise CallerError("the client has gone")
        body += bytes(message.get("body", b""))
        if len(body) > limit_bytes:
            raise BodyTooLargeError(f"the body has more than {limit_bytes} bytes")
        if not message.get("more_body", False):
            return body


async def send_answer(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    """Send a whole answer."""
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
