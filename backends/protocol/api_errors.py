"""How the APIs that clients speak write an error: as the body of an answer, and as an event of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from plait.backends.errors import ContextLengthError, PlaitError
from plait.backends.protocol.context_overflow import is_overflow, overflow_error

Event = Mapping[str, Any]
"""The data of an event. Its `type` is also the event's name."""

OVERFLOW: Final = ContextLengthError.default_code
"""OpenAI's code for a prompt that is too long. Clients then shorten the conversation."""

ABOVE_LIMIT: Final = {"code": "integer_above_max_value", "param": "max_output_tokens"}
"""OpenAI's code for an output limit that the prompt leaves no room for. A shorter limit fits."""

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


def write_event(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), msgspec.json.encode(event))


class ApiErrors:
    """How one API writes errors: OpenAI's error object, where a subclass does not say otherwise."""

    are_openais: ClassVar[bool] = True
    """Whether an engine's answer that is OpenAI's error object is one of this API."""

    def body(self, error: PlaitError) -> bytes:
        return error.body()

    def event(self, error: PlaitError) -> bytes:
        """An error in a stream that has begun."""
        return b"data: %b\n\n" % error.body()


class ResponseErrors(ApiErrors):
    """Those of OpenAI's responses, whose streams have typed events."""

    def body(self, error: PlaitError) -> bytes:
        """The error object, which has the same shape in all of OpenAI's APIs."""
        if isinstance(error, ContextLengthError) and error.prompt_fits:
            return msgspec.json.encode({"error": {**error.error_object, **ABOVE_LIMIT}})
        return error.body()

    def event(self, error: PlaitError) -> bytes:
        """An `error` event with the number 0, since the stream's last number is not known here."""
        return write_event(response_error(error.error_object, 0))


class MessageErrors(ApiErrors):
    """Anthropic's. Its clients skip events without a name."""

    are_openais = False

    def body(self, error: PlaitError) -> bytes:
        return msgspec.json.encode(as_message_error(error))

    def event(self, error: PlaitError) -> bytes:
        return write_event(as_message_error(error))


COMPLETION_ERRORS: Final = ApiErrors()
RESPONSE_ERRORS: Final = ResponseErrors()
MESSAGE_ERRORS: Final = MessageErrors()


def response_error(error: Mapping[str, Any], number: int) -> Event:
    """An `error` event for OpenAI's error object. OpenAI's SDKs raise at its field `error`."""
    message = str(error.get("message") or "The engine has failed.")
    error = {"code": None, **error, **overflow_fields(message)}
    code = error["code"]
    return {
        "type": "error",
        "code": None if code is None else str(code),
        "message": message,
        "param": error.get("param"),
        "sequence_number": number,
        "error": error,
    }


def overflow_fields(message: str) -> dict[str, Any]:
    """The fields of an error whose message says that the request is too long; none for any other."""
    if not is_overflow(message):
        return {}
    return ABOVE_LIMIT if overflow_error(message).prompt_fits else {"code": OVERFLOW}


def message_error(kind: str, message: str) -> Event:
    """An `error` event of Anthropic's, which is also the body of an error."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def as_message_error(error: PlaitError) -> Event:
    if isinstance(error, ContextLengthError):
        return message_error("invalid_request_error", _too_long(error))
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return message_error(kind, error.message)


def _too_long(error: ContextLengthError) -> str:
    """Anthropic's words, with the numbers if known.

    At the ones for a prompt that is too long, its clients shorten the conversation. At the others they ask for less.
    """
    prompt, output, context = error.prompt_tokens, error.output_tokens, error.context_tokens
    if prompt is None or context is None:
        return f"prompt is too long: {error.message}"
    if error.prompt_fits:
        return f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {context}"
    return f"prompt is too long: {prompt if prompt > context else prompt + output} tokens > {context} maximum"
