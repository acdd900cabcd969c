"""Answers of OpenAI's responses and Anthropic's messages, as engines write them that have these routes.

Their streams have typed events, and a last event without which the answer is not whole. No event is ever withheld.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import msgspec

from plait.backends.errors import EngineBrokenError, EngineError
from plait.backends.protocol.api_errors import MESSAGE_ERRORS, RESPONSE_ERRORS, ApiErrors
from plait.backends.protocol.json_constants import without_constants
from plait.gateway.answers.completions import (
    AnswerForm,
    EventStream,
    UsageBounds,
    WholeAnswer,
    garbled,
    read_usage,
    reported_error,
)
from plait.gateway.answers.error_texts import error_within, stated_status
from plait.gateway.answers.event_bytes import with_data
from plait.gateway.answers.other_answers import Json, ObjectForm, json_object, said_of_object

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
KEEPALIVE = b'event: keepalive\ndata: {"type": "keepalive"}\n\n'


class TypedStream(EventStream):
    """One stream of typed events. Only events with one of the `markers` in them are decoded."""

    markers: ClassVar[tuple[bytes, ...]]
    last_event: ClassVar[str]
    is_whole = False

    @property
    def problem(self) -> EngineError | str | None:
        """Why the ended stream is not a whole answer; None if it is one."""
        if self.error is None and not self.is_whole:
            return EngineBrokenError(f"engine {self._engine_id} ended its stream without {self.last_event}")
        return self.error

    @abstractmethod
    def _read(self, body: Json) -> None:
        """Record what the data of an event says."""

    def _says_more(self, events: bytes) -> bool:
        return any(marker in events for marker in self.markers)

    def _pass(self, event: bytes) -> bytes:
        data = event.partition(b"data:")[2]
        body = json_object(data)
        if body is not None:
            self._read(body)
        elif (mended := without_constants(data)) is not None:
            return self._pass(with_data(event, msgspec.Raw(mended)))
        return event


class ResponseStream(TypedStream):
    markers = (b"response.completed", b"response.incomplete", b"response.failed", b'"error"')
    last_event = "response.completed"

    def _read(self, body: Json) -> None:
        kind, response = body.get("type"), body.get("response")
        if kind == "error" or isinstance(body.get("error"), dict):
            self.error = reported_error(self._engine_id, body.get("error") or body)
        elif kind in {"response.completed", "response.incomplete"} and isinstance(response, dict):
            self._used(usage_of_response(response.get("usage")))
            self.is_whole, self.finish = True, str(response.get("status"))
        elif kind == "response.failed":
            self.error = reported_error(self._engine_id, response.get("error") if isinstance(response, dict) else None)


class MessageStream(TypedStream):
    """The events of `/v1/messages`. The first event has the prompt's tokens, a later event the output's."""

    markers = (b"message_start", b"message_delta", b"message_stop", b'"error"')
    last_event = "message_stop"
    is_given_up = False  # the engine has ended the message without a reason

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counts: Json = {}

    def _read(self, body: Json) -> None:
        kind, message = body.get("type"), body.get("message")
        usage = message.get("usage") if kind == "message_start" and isinstance(message, dict) else body.get("usage")
        if kind == "error":
            self.error = reported_error(self._engine_id, body.get("error"))
        elif kind == "message_stop":
            self.is_whole = not self.is_given_up
        elif isinstance(usage, dict):
            delta = body.get("delta")
            if isinstance(delta, dict) and "stop_reason" in delta:
                self.is_given_up = delta["stop_reason"] is None
                self.finish = None if self.is_given_up else str(delta["stop_reason"])
            self._counts |= {name: count for name, count in usage.items() if count is not None}
            self._used(usage_of_message(self._counts))

    def _pass(self, event: bytes) -> bytes:
        passed = super()._pass(event)
        return b"" if self.is_given_up and b"message_stop" in event else passed  # an error event follows instead


def usage_of_response(usage: object) -> object:
    if not isinstance(usage, dict):
        return usage
    return {
        "prompt_tokens": usage.get("input_tokens", 0),
        "completion_tokens": usage.get("output_tokens", 0),
        "prompt_tokens_details": usage.get("input_tokens_details"),
    }


def usage_of_message(usage: object) -> object:
    """A message's usage under the names of completions. Anthropic's `input_tokens` leave out the cached ones."""
    if not isinstance(usage, dict):
        return usage
    cached, written = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
    counts = [usage.get("input_tokens", 0), cached or 0, written or 0]
    is_counted = all(isinstance(count, int) for count in counts)
    return {
        "prompt_tokens": sum(counts) if is_counted else counts[0],
        "completion_tokens": usage.get("output_tokens", 0),
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


class TypedForm(AnswerForm):
    """Objects and typed events. Neither is made of the other: engines with these routes know `stream`."""

    def assembled(self, engine_id: str, events: bytes) -> bytes:  # noqa: ARG002
        raise garbled(engine_id, "a stream for a call that asked for none")

    def as_events(self, engine_id: str, answer: bytes | bytearray, *, withhold: bool) -> bytes | None:  # noqa: ARG002
        raise garbled(engine_id, "a whole answer for a call that asked for a stream")


class ResponseForm(TypedForm):
    """Objects and events of `/v1/responses`."""

    errors: ApiErrors = RESPONSE_ERRORS
    token_mark = b'.delta"'

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an answer. Its status has to be `completed` or `incomplete`."""
        body = _object(engine_id, answer)
        usage, corrected = read_usage(usage_of_response(body.get("usage")), bounds)
        if (error := error_within(body)) is not None:
            return WholeAnswer(usage, corrected, stated_status(error))
        if body.get("status") not in {"completed", "incomplete"}:
            raise garbled(engine_id, "a response that is not completed")
        return WholeAnswer(usage, corrected, finish=body["status"])

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:  # noqa: ARG002
        return ResponseStream(engine_id, bounds)

    def sign_of_life(self, comment: str, *, has_begun: bool) -> bytes:
        """OpenAI's own sign of life, behind the comment. The first event of a stream has to be `response.created`."""
        return super().sign_of_life(comment, has_begun=has_begun)[:-1] + (KEEPALIVE if has_begun else b"\n")


class MessageForm(TypedForm):
    """Objects and events of `/v1/messages`."""

    errors: ApiErrors = MESSAGE_ERRORS
    token_mark = b"event: content_block_delta"

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an answer, which has to have a stop reason."""
        body = _object(engine_id, answer)
        usage, corrected = read_usage(usage_of_message(body.get("usage")), bounds)
        if (error := error_within(body)) is not None:
            return WholeAnswer(usage, corrected, stated_status(error))
        if body.get("stop_reason") is None:
            raise garbled(engine_id, "a message without a stop reason")
        return WholeAnswer(usage, corrected, finish=str(body["stop_reason"]))

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:  # noqa: ARG002
        return MessageStream(engine_id, bounds)

    def sign_of_life(self, comment: str, *, has_begun: bool) -> bytes:
        """Anthropic's own sign of life, behind the comment."""
        return super().sign_of_life(comment, has_begun=has_begun)[:-1] + PING


RESPONSE, MESSAGE = ResponseForm(), MessageForm()
RESPONSE_TOKENS, MESSAGE_TOKENS = ObjectForm(RESPONSE_ERRORS), ObjectForm(MESSAGE_ERRORS)
"""Counts of tokens of the two APIs."""


def _object(engine_id: str, answer: bytes | bytearray) -> Json:
    body = said_of_object(answer)
    if body is None:
        raise garbled(engine_id, "an answer that is not a JSON object")
    return body
