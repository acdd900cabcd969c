"""ASGI's send for a client that speaks another API than chat completions: translates what is sent to it."""

from __future__ import annotations

from starlette.types import Message, Send

from plait.backends.translation.translation import AnswerTranslator, Translation
from plait.gateway.answers.answer_forms import error_of
from plait.gateway.asgi import Headers, is_event_stream

_OF_THE_BODY = frozenset((b"content-length", b"content-type"))


class TranslatedAnswer:
    """The answer to one request. A whole body waits until it has all come; events go on as they come."""

    def __init__(self, to_client: Send, translation: Translation, translator: AnswerTranslator) -> None:
        self._to_client = to_client
        self._translation = translation
        self._translator = translator
        self._head: Message | None = None  # until the client has it
        self._is_stream = False
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        """ASGI's send."""
        if message["type"] == "http.response.start":
            self._is_stream = message["status"] == 200 and is_event_stream(message["headers"])
            self._head = message
            if self._is_stream:
                await self._to_client(message)
        elif self._is_stream:
            body = message.get("body", b"")
            is_note = body.startswith(b":")  # of a call that waits: it comes on its own, before the events
            await self._to_client({**message, "body": body if is_note else self._translator.feed(body)})
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._send_whole(b"".join(self._parts))

    async def _send_whole(self, answer: bytes) -> None:
        head = self._head
        assert head is not None
        body = self._translator.whole(answer) if head["status"] == 200 else self._error(head["status"], answer)
        kept: Headers = [item for item in head["headers"] if item[0] not in _OF_THE_BODY]
        headers = [
            *kept,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._to_client({**head, "headers": headers})
        await self._to_client({"type": "http.response.body", "body": body})

    def _error(self, status: int, answer: bytes) -> bytes:
        """The error object of an engine in the client's API."""
        return self._translation.error(error_of(status, answer))
