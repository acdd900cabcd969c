"""Marks on answers that clients get although they are not stored: a header, or in a stream a field or a comment."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Message

from plait.backends.errors import PlaitError
from plait.gateway.answers.event_bytes import with_data
from plait.gateway.answers.other_answers import json_object
from plait.gateway.asgi import NOT_DURABLE, Headers

ErrorT = TypeVar("ErrorT", bound=PlaitError)

UNSTORED_END: Final = b": plait-durable=false\n\n"


def unstored_headers(headers: Headers) -> Headers:
    return [*headers, NOT_DURABLE]


def unstored_error(error: ErrorT) -> ErrorT:
    error.is_stored = False
    return error


def unstored_messages(messages: list[Message]) -> list[Message]:
    """Marks a whole answer (by a header) or the end of a stream (by a comment)."""
    if not messages:
        return messages
    first, *rest = messages
    if first["type"] == "http.response.start":
        return [{**first, "headers": unstored_headers(first["headers"])}, *rest]
    return [{**first, "body": UNSTORED_END + first.get("body", b"")}, *rest]


def unstored_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Marks an object in a stream."""
    return {**fields, "durable": False}


def unstored_event(event: bytes) -> bytes:
    return with_data(event, unstored_fields(json_object(event.partition(b"data:")[2]) or {}))


def unstored_events(events: list[bytes]) -> list[bytes]:
    return [*events[:-1], *map(unstored_event, events[-1:])]


def unstored_response(answer: Response) -> Response:
    answer.raw_headers.append(NOT_DURABLE)
    return answer
