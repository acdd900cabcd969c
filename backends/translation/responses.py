"""OpenAI's Responses API (`POST /v1/responses`) over chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.backends.errors import PlaitError
from plait.backends.translation.answer_translator import TurnTranslator
from plait.backends.translation.events import write_event
from plait.backends.translation.fields import Json
from plait.backends.translation.identity import new_identity
from plait.backends.translation.response_turn import ResponseTurn, error_event
from plait.backends.translation.responses_request import chat_request


class ResponsesTranslation:
    """Implements Translation."""

    path = "/v1/responses"

    def to_chat(self, fields: Mapping[str, Any]) -> Json:
        """The fields of a chat-completions body.

        `previous_response_id` is left out. Put the items of that response, and of those before it, into `input` first.
        """
        return chat_request(fields)

    def answer(self, fields: Mapping[str, Any]) -> TurnTranslator:
        """A translator for the answer, with a new id."""
        return TurnTranslator(ResponseTurn(fields, new_identity()))

    def error(self, error: PlaitError) -> bytes:
        """The body of an error; it has the same shape in all of OpenAI's APIs."""
        return error.body()

    def error_event(self, error: PlaitError) -> bytes:
        """An `error` event with the number 0, since the stream's last number is not known here."""
        return write_event(error_event(error.error_object, 0))
