"""The recorded answer to a chained call. The call can outlive its client; a repeated request gets the same answer."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

from plait.backends.errors import PlaitError
from plait.gateway.asgi import Headers
from plait.gateway.programs.answer_window import AnswerWindow, Follower, Ledger

KEEP_ALIVE = b": waiting\n\n"
"""A comment in a stream of server-sent events. Clients skip it."""

MAX_LAG_BYTES = 2**20
"""The writer waits while a follower is further behind than this. A stream of text takes minutes for so much."""


class RecordedAnswer:
    """One answer as ASGI messages. Its writer calls `send`; any number of clients `follow` it.

    With `keeps`, all messages are kept, as long as `ledger` allows it. Otherwise only those are held that a follower
    has not been sent yet. An answer with a status of 500 or above is a failure. Clients do not get it until `fail`
    makes it final.
    """

    __slots__ = ("_ended", "_error", "_held_back", "_seen", "_waiting", "_window")

    def __init__(self, ledger: Ledger, *, keeps: bool) -> None:
        self._window = AnswerWindow(ledger, keeps=keeps)
        self._held_back = False
        self._seen = False  # whether a client has been sent more than comments
        self._ended = False
        self._error: PlaitError | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def send(self, message: Message) -> None:
        """ASGI's send: record a message of the response. Waits while a follower is more than `MAX_LAG_BYTES` behind.

        Raises `PlaitError` if the tenant may not hold so much.
        """
        self._window.write(message)
        if message["type"] == "http.response.start":
            self._held_back = message["status"] >= 500
        else:
            self._ended = not message.get("more_body", False)
        self._wake()
        while not (self._ended or self._held_back) and self.lag_bytes > MAX_LAG_BYTES:
            await self._change()

    def fail(self, error: PlaitError) -> None:
        """End the answer with an error. An answer that has ended already stays as it is. Neither is kept."""
        if not self._ended:
            self._ended, self._error = True, error
        self._held_back = False
        self._window.drop()
        self._wake()

    def take_back(self) -> bool:
        """Discard the recording, so that it can start again; False if a client has been sent a part of it."""
        if self._seen:
            return False
        self._window.clear()
        self._ended, self._held_back = False, False
        return True

    @property
    def ended(self) -> bool:
        """Whether the answer is complete or failed."""
        return self._ended

    @property
    def kept(self) -> bool:
        """Whether it can still be followed from its beginning."""
        return self._window.keeps

    @property
    def held_bytes(self) -> int:
        """The size of the messages that are held."""
        return self._window.held_bytes

    @property
    def lag_bytes(self) -> int:
        """How far the slowest follower is behind."""
        return self._window.lag_bytes

    def drop(self) -> None:
        """Keep the recording no longer. Clients that follow it already still read it to its end."""
        self._window.drop()

    async def follow(self, send: Send, headers: Headers, keep_alive_s: float | None = None) -> None:
        """Send the answer to a client as it comes. Raises `PlaitError` only while nothing has been sent.

        `keep_alive_s` is given for a stream. Until the answer begins, a comment is sent every `keep_alive_s`. The first
        comment starts the response, with `headers`.
        """
        follower, begun = Follower(), False
        self._window.followers[follower] = None
        try:
            while not await self._begins(follower, keep_alive_s):
                await _keep_alive(send, headers, begun=begun)
                begun = True
            await self._pass_on(follower, send, begun=begun)
        except PlaitError as error:
            if not begun and not follower.messages:
                raise
            await send({"type": "http.response.body", "body": _event(error.body())})
        finally:
            self._window.leave(follower)
            self._wake()

    async def _begins(self, follower: Follower, within_s: float | None) -> bool:
        """Wait for the first message; False if it does not come in time. Raises the error that it failed with."""
        if within_s is None:
            await self._next(follower)
            return True
        try:
            async with asyncio.timeout(within_s):
                await self._next(follower)
        except TimeoutError:
            return False
        return True

    async def _pass_on(self, follower: Follower, send: Send, *, begun: bool) -> None:
        refused = False
        while True:
            message = await self._next(follower)
            self._seen = True
            is_head = message["type"] == "http.response.start"
            if begun and is_head:
                refused = message["status"] != 200
            else:
                await send({**message, "body": _event(message["body"])} if refused else message)
            self._window.was_sent(follower, message)
            self._wake()
            if not is_head and not message.get("more_body", False):
                return

    async def _next(self, follower: Follower) -> Message:
        """Wait for a follower's next message; raises the error that the answer failed with."""
        while (message := self._window.next(follower)) is None or self._held_back:
            if self._error is not None:
                raise self._error
            await self._change()
        return message

    async def _change(self) -> None:
        """Wait until something has come, or a follower has read or gone."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _wake(self) -> None:
        if self._waiting:
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
