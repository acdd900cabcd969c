"""Anthropic's Messages API (`POST /v1/messages`, `POST /v1/messages/count_tokens`) over chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from plait.backends.errors import PlaitError
from plait.backends.translation.answer_translator import TurnTranslator
from plait.backends.translation.events import Event, write_event
from plait.backends.translation.fields import Json
from plait.backends.translation.identity import new_identity
from plait.backends.translation.message_turn import MessageTurn, error_event
from plait.backends.translation.messages_request import chat_request, prompt_request

COUNT_TOKENS: Final = "/v1/messages/count_tokens"

# status -> Anthropic's type of error; other statuses below 500 are the caller's, the rest the server's
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessagesTranslation:
    """Implements Translation."""

    path = "/v1/messages"

    def to_chat(self, fields: Mapping[str, Any]) -> Json:
        """The fields of a chat-completions body."""
        return chat_request(fields)

    def to_count(self, fields: Mapping[str, Any]) -> Json:
        """The fields of a chat-completions body whose prompt's tokens are counted, for a body of `COUNT_TOKENS`.

        Raises CallerError as `to_chat` does.
        """
        return prompt_request(fields)

    def counted(self, input_tokens: int) -> bytes:
        """The answer of `COUNT_TOKENS`."""
        return msgspec.json.encode({"input_tokens": input_tokens})

    def answer(self, fields: Mapping[str, Any]) -> TurnTranslator:
        """A translator for the answer, with a new id."""
        return TurnTranslator(MessageTurn(fields, new_identity()))

    def error(self, error: PlaitError) -> bytes:
        """The body of an error."""
        return msgspec.json.encode(_error(error))

    def error_event(self, error: PlaitError) -> bytes:
        """An `error` event. It needs nothing of the stream before it."""
        return write_event(_error(error))


def _error(error: PlaitError) -> Event:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return error_event(kind, error.message)
