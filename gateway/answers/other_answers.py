"""Answers other than completions: JSON objects of any kind, and media."""

from __future__ import annotations

from typing import Any

import msgspec

from plait.backends.errors import EngineBrokenError, EngineError
from plait.backends.http.content_types import is_no_json
from plait.backends.protocol.api_errors import COMPLETION_ERRORS, ApiErrors
from plait.backends.protocol.json_constants import without_constants
from plait.backends.protocol.openai import check_unicode
from plait.gateway.answers.completions import (
    AnswerForm,
    EventStream,
    UsageBounds,
    WholeAnswer,
    read_usage,
)
from plait.gateway.answers.error_texts import error_within, stated_status

Json = dict[str, Any]


class _Said(msgspec.Struct, frozen=True):
    usage: Any = msgspec.UNSET
    error: Any = msgspec.UNSET
    object: Any = msgspec.UNSET
    code: Any = msgspec.UNSET
    status: Any = msgspec.UNSET
    type: Any = msgspec.UNSET
    stop_reason: Any = msgspec.UNSET


_SAID = msgspec.json.Decoder(_Said)


def said_of_object(answer: bytes | bytearray) -> Json | None:
    """The fields of `_Said` in a JSON object; None for anything else. Texts and vectors are not decoded."""
    try:
        check_unicode(answer)
        said = _SAID.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return {name: value for name, value in msgspec.structs.asdict(said).items() if value is not msgspec.UNSET}


def is_json(data: bytes | bytearray) -> bool:
    try:
        check_unicode(data)
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def json_object(data: bytes | bytearray) -> Json | None:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class ObjectForm(AnswerForm):
    """Any JSON, such as embeddings, with or without a usage. Vectors may also come as bytes."""

    def __init__(self, errors: ApiErrors = COMPLETION_ERRORS) -> None:
        self.errors = errors

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:  # noqa: ARG002
        """Read an answer. Nothing is read of an answer that is no JSON object."""
        body = said_of_object(answer)
        if body is None:
            mended = without_constants(answer)
            return WholeAnswer(mended=mended, is_not_json=mended is None and not is_json(answer))
        usage, corrected = read_usage(body.get("usage"), bounds)
        error = error_within(body)
        return WholeAnswer(usage, corrected, None if error is None else stated_status(error))

    def as_events(self, engine_id: str, answer: bytes | bytearray, *, withhold: bool) -> bytes | None:  # noqa: ARG002
        return None


class PassedBytes(EventStream):
    """A stream of bytes of any type, not interpreted. It is whole when its engine has ended it, and may be empty."""

    may_be_empty = True
    _has_begun = False
    _has_ended = False

    @property
    def problem(self) -> EngineError | None:
        """An answer that has not ended is not whole."""
        return None if self._has_ended else EngineBrokenError(f"engine {self._engine_id} has not ended its answer")

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to forward. White space at the beginning is kept back, because it does not begin an answer."""
        self._pieces.append(chunk)
        if not self._has_begun and not chunk.strip():
            return b""
        self._has_begun = True
        return self._kept()

    def end(self) -> bytes:
        self._has_ended = True
        return self._kept()

    def _kept(self) -> bytes:
        kept = b"".join(self._pieces)
        self._pieces.clear()
        return kept

    def _says_more(self, events: bytes) -> bool:  # noqa: ARG002
        return False

    def _pass(self, event: bytes) -> bytes:
        return event


class MediaForm(ObjectForm):
    """Audio and images: JSON, or bytes of any type, which are not read and go to the client as they come."""

    has_events = False
    streams = staticmethod(is_no_json)

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:  # noqa: ARG002
        """A stream of bytes or events, which are not interpreted."""
        return PassedBytes(engine_id, bounds)


OBJECT, MEDIA = ObjectForm(), MediaForm()
