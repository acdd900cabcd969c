"""Errors in the shapes of both APIs."""

from __future__ import annotations

import json

import pytest
from anthropic.types.shared import ErrorObject
from openai.types.responses import ResponseErrorEvent
from pydantic import TypeAdapter

from plait.backends.errors import (
    AuthenticationError,
    BodyTooLargeError,
    CallerError,
    EngineError,
    EngineStatusError,
    EngineTimeoutError,
    LimitError,
    NoEngineError,
    NotFoundError,
    OverloadedError,
    PlaitError,
)
from plait.backends.protocol.api_errors import MESSAGE_ERRORS, RESPONSE_ERRORS

ERROR: TypeAdapter[object] = TypeAdapter(ErrorObject)


def test_openais_shape() -> None:
    error = CallerError("no", param="input")
    assert RESPONSE_ERRORS.body(error) == error.body()
    name, data, _, end = RESPONSE_ERRORS.event(error).split(b"\n")
    assert (name, end) == (b"event: error", b"")
    event = ResponseErrorEvent.model_validate_json(data.removeprefix(b"data: "))
    assert (event.message, event.param, event.sequence_number) == ("no", "input", 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CallerError("no"), "invalid_request_error"),
        (AuthenticationError("no"), "authentication_error"),
        (NotFoundError("no"), "not_found_error"),
        (BodyTooLargeError("no"), "request_too_large"),
        (LimitError("no"), "rate_limit_error"),
        (OverloadedError("no"), "rate_limit_error"),
        (EngineError("no"), "api_error"),
        (EngineStatusError("no", 500), "api_error"),
        (EngineStatusError("no", 529), "overloaded_error"),
        (NoEngineError("no"), "overloaded_error"),
        (EngineTimeoutError("no"), "timeout_error"),
    ],
)
def test_anthropics_shape(error: PlaitError, kind: str) -> None:
    body = json.loads(MESSAGE_ERRORS.body(error))
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}}
    if kind != "request_too_large":  # the SDK has no class for it
        ERROR.validate_python(body["error"])
    assert MESSAGE_ERRORS.event(error) == b"event: error\ndata: " + MESSAGE_ERRORS.body(error) + b"\n\n"
