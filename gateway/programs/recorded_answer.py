"""The answer to a chained call, recorded as it comes: the call can outlive its client, and be asked for again."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

from plait.backends.errors import PlaitError
from plait.gateway.asgi import Headers

KEEP_ALIVE = b": waiting\n\n"
"""A comment in a stream of server-sent events: clients skip it."""


class RecordedAnswer:
    """One answer as ASGI messages. `send` is what its writer calls; any number of clients `follow` it.

    A failure, which is a status of 500 or above, is held back from them until `fail` says that it stands.
    """

    __slots__ = ("_ended", "_error", "_held_back", "_messages", "_seen", "_waiting", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self._held_back = False
        self._seen = False  # by any client, more of it than comments
        self._messages: list[Message] = []
        self._ended = False
        self._error: PlaitError | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def send(self, message: Message) -> None:
        """ASGI's send: takes a message of the response; does not wait for any client."""
        self._messages.append(message)
        if message["type"] == "http.response.start":
            self._held_back = message["status"] >= 500
        else:
            self.size_bytes += len(message.get("body", b""))
            self._ended = not message.get("more_body", False)
        self._wake()

    def fail(self, error: PlaitError) -> None:
        """There will be no more. An answer that has ended stays as it is."""
        if not self._ended:
            self._ended, self._error = True, error
        self._held_back = False
        self._wake()

    def take_back(self) -> bool:
        """Forget what was recorded, so that it can be recorded anew; False if a client has been sent some of it."""
        if self._seen:
            return False
        self._messages.clear()
        self._ended, self._held_back, self.size_bytes = False, False, 0
        return True

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._ended

    @property
    def kept(self) -> bool:
        """Whether it can still be followed from its beginning."""
        return bool(self._messages) or not self._ended or self._error is not None

    def drop(self) -> None:
        """Forget what was recorded. Those who follow it already still read to its end."""
        self._messages = []

    async def follow(self, send: Send, headers: Headers, keep_alive_s: float | None = None) -> None:
        """Pass the answer on as it comes. Raises `PlaitError` while nothing has been sent.

        With `keep_alive_s`, a stream is asked for: while nothing comes, it is begun with `headers`, and a comment sent
        each time.
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
        """Return when message number `index` is there; raises what the answer failed with."""
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
    """A JSON body as an event."""
    return b"data: %b\n\n" % b" ".join(body.splitlines())
