"""The recorded answer to a chained call. The call can outlive its client; a repeated request gets the same answer."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

from plait.backends.errors import PlaitError
from plait.gateway.asgi import Headers

KEEP_ALIVE = b": waiting\n\n"
"""A comment in a stream of server-sent events. Clients skip it."""


class RecordedAnswer:
    """One answer as ASGI messages. Its writer calls `send`; any number of clients `follow` it.

    An answer with a status of 500 or above is a failure. Clients do not get it until `fail` makes it final.
    """

    __slots__ = ("_ended", "_error", "_held_back", "_messages", "_seen", "_waiting", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self._held_back = False
        self._seen = False  # whether a client has been sent more than comments
        self._messages: list[Message] = []
        self._ended = False
        self._error: PlaitError | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def send(self, message: Message) -> None:
        """ASGI's send: record a message of the response. It does not wait for any client."""
        self._messages.append(message)
        if message["type"] == "http.response.start":
            self._held_back = message["status"] >= 500
        else:
            self.size_bytes += len(message.get("body", b""))
            self._ended = not message.get("more_body", False)
        self._wake()

    def fail(self, error: PlaitError) -> None:
        """End the answer with an error. An answer that has ended already stays as it is."""
        if not self._ended:
            self._ended, self._error = True, error
        self._held_back = False
        self._wake()

    def take_back(self) -> bool:
        """Discard the recording, so that it can start again; False if a client has been sent a part of it."""
        if self._seen:
            return False
        self._messages.clear()
        self._ended, self._held_back, self.size_bytes = False, False, 0
        return True

    @property
    def ended(self) -> bool:
        """Whether the answer is complete or failed."""
        return self._ended

    @property
    def kept(self) -> bool:
        """Whether it can still be followed from its beginning."""
        return bool(self._messages) or not self._ended or self._error is not None

    def drop(self) -> None:
        """Forget the recording. Clients that follow it already still read it to its end."""
        self._messages = []

    async def follow(self, send: Send, headers: Headers, keep_alive_s: float | None = None) -> None:
        """Send the answer to a client as it comes. Raises `PlaitError` only while nothing has been sent.

        `keep_alive_s` is given for a stream. Until the answer begins, a comment is sent every `keep_alive_s`. The first
        comment starts the response, with `headers`.
        """
        messages, index, begun, refused = self._messages, 0, False, False
        try:
            while index == 0 or messages[index - 1].get("more_body", index == 1):
                try:
                    async with asyncio.timeout(keep_alive_s if index == 0 else None):
                        await self._arrival(messages, index)
                except TimeoutError:
                    await _keep_alive(send, headers, begun=begun)
                    begun = True
                    continue
                message, self._seen = messages[index], True
                index += 1
                if begun and index == 1:
                    refused = message["status"] != 200
                else:
                    await send({**message, "body": _event(message["body"])} if refused else message)
        except PlaitError as error:
            if not begun and not index:
                raise
            await send({"type": "http.response.body", "body": _event(error.body())})

    async def _arrival(self, messages: list[Message], index: int) -> None:
        """Wait until message number `index` has come; raises the error that the answer failed with."""
        while len(messages) <= index or self._held_back:
            if self._error is not None:
                raise self._error
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


async def _keep_alive(send: Send, headers: Headers, *, begun: bool) -> None:
    if not begun:
        kind = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*kind, *headers]})
    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


def _event(body: bytes) -> bytes:
    """The server-sent event that carries a JSON body."""
    return b"data: %b\n\n" % b" ".join(body.splitlines())
