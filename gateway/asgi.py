"""The HTTP helpers of the plain ASGI routes: headers, bounded bodies, whole responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from starlette.types import Receive, Send

from plait.backends.errors import BodyTooLargeError, CallerError, MethodNotAllowedError, PlaitError

Headers = Sequence[tuple[bytes, bytes]]

RETRY_AFTER_S = {429: 1.0, 503: 1.0}
"""What a client is asked to wait after these statuses if the error does not say. Nothing predicts a better time."""

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection, so no answer can be sent."""


def header(headers: Headers, name: bytes) -> str | None:
    """The first value of a header (`name` in lower case), as text."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def is_event_stream(headers: Headers) -> bool:
    """Whether these are the headers of a stream of server-sent events."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """The request's body. Raises `BodyTooLargeError` as soon as it is known to exceed `max_bytes`."""
    declared = header(headers, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()  # not a list of pieces: a client that sends single bytes would take 40 times its body
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        if len(body) + len(piece) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body + piece) if body else piece
        body += piece


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Run `work` in this task. If the client goes, `work` is cancelled and `ClientGoneError` is raised."""
    task = asyncio.current_task()
    assert task is not None
    working = True

    def on_gone(watcher: asyncio.Future[None]) -> None:
        if working and not watcher.cancelled():
            task.cancel()

    watcher = asyncio.ensure_future(until_disconnect(receive))
    watcher.add_done_callback(on_gone)
    try:
        return await work
    except asyncio.CancelledError:
        if not watcher.done() or task.uncancel() > 0:
            raise  # the client has not gone: the gateway is stopping
        raise ClientGoneError from None
    finally:
        working = False  # on_gone may already be scheduled
        watcher.cancel()


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a response in one piece, with its content-length."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: PlaitError, request_id: str) -> None:
    """Send an OpenAI error object with the error's status."""
    headers = [*error_headers(error), (b"x-request-id", request_id.encode("latin-1"))]
    await send_whole(send, error.status, headers, error.body())


def error_headers(error: PlaitError) -> list[tuple[bytes, bytes]]:
    """The headers of an error's response."""
    headers = [(b"content-type", b"application/json")]
    retry_after_s = RETRY_AFTER_S.get(error.status) if error.retry_after_s is None else error.retry_after_s
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(retry_after_s))).encode()))
    if isinstance(error, MethodNotAllowedError):
        headers.append((b"allow", b"POST"))
    if not isinstance(error, CallerError) or error.status == 409:  # the SDK would retry these by itself
        headers.append((b"x-should-retry", b"false" if error.status == 409 else b"true"))
    return headers


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The request body is too large; this gateway accepts at most {max_bytes} bytes.")
