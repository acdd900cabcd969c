"""The answer to a client that asked for no stream, made of the engine's stream.

The engine's form of the answer ends here and the client's begins. Below, the call is streamed like any other, so that
its text and its first-token time are there as soon as the engine sends them.
"""

from __future__ import annotations

import msgspec
from starlette.types import Message, Send

from plait.backends.errors import EngineError
from plait.gateway.answers.completion_body import garbled, reported_error
from plait.gateway.asgi import Headers, header, is_event_stream, send_whole
from plait.gateway.calls.open_bodies import OpenAnswer
from plait.gateway.calls.upstream import MAX_ANSWER_BYTES
from plait.gateway.programs.assembled_completion import AssembledCompletion

_OF_A_STREAM = frozenset((b"content-type", b"cache-control", b"x-accel-buffering"))


class UnstreamedAnswer:
    """Assembles the stream that is sent to it and sends it on as one answer. What it holds meanwhile counts in `held`.

    An answer that is no stream goes on as it is. A stream that ends with the engine's error does not go on: the call is
    tried again or fails. Each head begins a new answer.
    """

    __slots__ = ("_completion", "_headers", "_held", "_held_bytes", "_is_stream", "_to_client")

    def __init__(self, to_client: Send, held: OpenAnswer) -> None:
        self._to_client = to_client
        self._held = held
        self._held_bytes = 0
        self._is_stream = False
        self._headers: Headers = ()
        self._completion: AssembledCompletion | None = None

    async def send(self, message: Message) -> None:
        """ASGI's send. Raises `EngineError` if the events are no completion, `LimitError` or
        `AnswerTooLargeError` if they are too much.
        """
        if message["type"] == "http.response.start":
            self.drop()
            self._headers = message["headers"]
            self._is_stream = message["status"] == 200 and is_event_stream(self._headers)
            if self._is_stream:
                self._completion = AssembledCompletion()
                return
        if not self._is_stream:
            await self._to_client(message)
            return
        completion = self._completion
        if completion is not None:
            self._feed(completion, message.get("body", b""))
            if not message.get("more_body", False):
                await self._end(completion)

    def drop(self) -> None:
        """Forget what has come of a stream; the rest of it goes nowhere."""
        self._completion = None
        self._held.end()
        self._held_bytes = 0

    @property
    def _engine_id(self) -> str:
        return header(self._headers, b"plait-engine") or ""

    def _feed(self, completion: AssembledCompletion, events: bytes) -> None:
        try:
            completion.feed(events)
        except ValueError as error:
            self.drop()
            raise garbled(self._engine_id, "an event that is no part of a completion") from error
        if completion.size_bytes > MAX_ANSWER_BYTES:
            self.drop()
            raise garbled(self._engine_id, f"an answer of over {MAX_ANSWER_BYTES} bytes")
        more_bytes = completion.size_bytes - self._held_bytes
        if more_bytes:
            self._held.hold(more_bytes)
            self._held_bytes += more_bytes

    async def _end(self, completion: AssembledCompletion) -> None:
        """The stream has ended. The relay has checked it, so it is whole or ends with an error."""
        error, body, status = completion.error, completion.json(), 200
        self.drop()
        if error is not None:
            if isinstance(reported_error(self._engine_id, error), EngineError):
                return
            status, body = _refusal(error)
        headers = [item for item in self._headers if item[0] not in _OF_A_STREAM]
        await send_whole(self._to_client, status, [*headers, (b"content-type", b"application/json")], body)


def _refusal(error: object) -> tuple[int, bytes]:
    """The status and the body of an error that is the caller's fault."""
    assert isinstance(error, dict), "its code says whose fault it is"
    return error["code"], msgspec.json.encode({"error": error})
