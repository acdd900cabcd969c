"""The end of an answer, which is held until the value that it tells of is stored."""

from __future__ import annotations

from starlette.types import Message, Send

from plait.gateway.programs.record import Unrecorded

STREAM_END = b"data: [DONE]\n\n"

NOT_DURABLE = ((b"plait-durable", b"false"),)
"""What is told is not stored, though it should be: the store cannot be written."""


class HeldEnd:
    """Passes an answer on to `send`, but for its end, until `release`.

    The end is the last message, or the last event of a stream. An answer that `is_whole` is held from its beginning on.
    """

    __slots__ = ("_held", "_is_whole", "_record", "_send")

    def __init__(self, send: Send, record: Unrecorded, *, is_whole: bool) -> None:
        self._send = send
        self._record = record
        self._is_whole = is_whole
        self._held: list[Message] = []

    @property
    def body(self) -> bytes:
        """What is held of the answer's body."""
        return b"".join(message.get("body", b"") for message in self._held)

    async def send(self, message: Message) -> None:
        """ASGI's send."""
        if self._held or self._is_whole or _is_end(message):
            self._held.append(message)
        else:
            await self._send(_marked(message, is_stored=self._record.is_durable))

    def clear(self) -> None:
        """The answer begins again."""
        self._held.clear()

    async def release(self) -> None:
        """Pass on what is held, once all so far is stored. An answer that begins now says so if it is not.

        Raises `PlaitError` if nobody may be told any more, because another gateway has the session.
        """
        is_stored = await self._record.stored()
        held, self._held = self._held, []
        for message in held:
            await self._send(_marked(message, is_stored=is_stored))


def _marked(message: Message, *, is_stored: bool) -> Message:
    """The message; a head says that the value is not stored."""
    if is_stored or message["type"] != "http.response.start":
        return message
    return {**message, "headers": [*message["headers"], *NOT_DURABLE]}


def _is_end(message: Message) -> bool:
    if message["type"] == "http.response.start":
        return False
    return not message.get("more_body", False) or bytes(message.get("body", b"")).endswith(STREAM_END)
