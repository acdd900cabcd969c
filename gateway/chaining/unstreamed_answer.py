"""An unstreamed answer for the client, assembled from the engine's stream.

A call with an output always streams from its engine (`as_stream`), so that getters can read the text as it is
generated, and the time of the first token is known. `UnstreamedAnswer` makes one JSON body of the stream's events.
"""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.types import Message

from plait.backends.errors import EngineError
from plait.backends.http.content_types import is_event_stream
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.answers.assembled_completion import AssembledCompletion, Fields
from plait.gateway.answers.completions import garbled, reported_error
from plait.gateway.answers.error_texts import stated_status
from plait.gateway.asgi import Headers, MessageSink, PassingSink, header
from plait.gateway.calls.open_answers import OpenAnswer
from plait.gateway.calls.outgoing import FIELDS, OWN_USAGE
from plait.gateway.calls.upstream import MAX_ANSWER_BYTES

_OF_A_STREAM = frozenset((b"content-type", b"cache-control", b"x-accel-buffering"))

_WHOLE_ONLY = frozenset(
    (
        "best_of", "use_beam_search", "prompt_logprobs", "return_hidden_states", "kv_transfer_params",
        "ec_transfer_params", "modalities", "audio",
    )
)  # fmt: skip
"""Fields that engines refuse in a stream, or whose results they leave out of it."""

_UNSET = (b"null", b"false")
_STREAM: Final = FIELDS.decode(msgspec.json.encode({"stream": True, "stream_options": OWN_USAGE}))


def as_stream(fields: Fields, request: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest | None:
    """The request for a stream with its usage; `fields` of the body are changed, too.

    None, without a change, if the request has a field that engines do not serve in a stream.
    """
    if any(bytes(fields[name]) not in _UNSET for name in _WHOLE_ONLY & fields.keys()):
        return None
    fields |= _STREAM
    return msgspec.structs.replace(request, stream=True, stream_options=OWN_USAGE)


class UnstreamedAnswer(PassingSink):
    """A sink that assembles a stream and forwards it as one answer. Its memory counts in `held`.

    An answer that is no stream is forwarded as it is. A stream that ends with an error of the engine is dropped: the
    call is delivered again or fails. Each head begins a new answer.
    """

    def __init__(self, to_client: MessageSink, held: OpenAnswer) -> None:
        super().__init__(to_client)
        self._held = held
        self._held_bytes = 0
        self._is_stream = False
        self._headers: Headers = ()
        self._completion: AssembledCompletion | None = None

    def put(self, message: Message) -> None:
        """Raises `EngineError` for events of no completion, `LimitError` or `AnswerTooLargeError` beyond a limit."""
        if message["type"] == "http.response.start":
            self.drop()
            self._headers = message["headers"]
            self._is_stream = message["status"] == 200 and is_event_stream(self._headers)
            if self._is_stream:
                self._completion = AssembledCompletion()
                return
        if not self._is_stream:
            self._to.put(message)
            return
        completion = self._completion
        if completion is not None:
            self._feed(completion, message.get("body", b""))
            if not message.get("more_body", False):
                self._end(completion)

    def drop(self) -> None:
        """Discard the stream so far, and ignore the rest of it."""
        self._completion = None
        if self._held_bytes:
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
            self._held_bytes += more_bytes
            self._held.hold(more_bytes)

    def _end(self, completion: AssembledCompletion) -> None:
        """The stream has ended. The relay has checked that it is whole or ends with an error."""
        error, body, status = completion.error, completion.json(), 200
        self.drop()
        if error is not None:
            if isinstance(reported_error(self._engine_id, error), EngineError):
                return
            status, body = stated_status(error), msgspec.json.encode({"error": error})
        headers = [item for item in self._headers if item[0] not in _OF_A_STREAM]
        self._to.whole(status, [*headers, (b"content-type", b"application/json")], body)
