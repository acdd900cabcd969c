"""The forms of engines' answers: how the gateway reads the usage, the endings and the errors of each."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from plait.backends.errors import CallerError, EngineError, PlaitError
from plait.gateway.answers.completion_body import (
    UsageBounds,
    decode_whole,
    ending_problem,
    endings,
    garbled,
    read_usage,
    reported_error,
)
from plait.gateway.answers.event_stream import CompletionStream, EventStream
from plait.gateway.answers.typed_streams import (
    Json,
    MessageStream,
    ResponseStream,
    said_of_object,
    usage_of_message,
    usage_of_response,
)
from plait.gateway.fleet.booking import CallUsage


class _ErrorBody(msgspec.Struct):
    error: dict[str, object] = {}


def error_of(status: int, answer: bytes) -> PlaitError:
    """The error in an answer, which has OpenAI's shape."""
    try:
        fields = msgspec.json.decode(answer, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
    message, param, code = (fields.get(name) for name in ("message", "param", "code"))
    error: PlaitError = (CallerError if status < 500 else PlaitError)(
        str(message or f"The engine answered with status {status}."),
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )
    error.status = status
    return error


class WholeAnswer(NamedTuple):
    """What an answer that is not streamed says. `problem` is what is wrong with it by the caller's fault.

    `usage_corrected` is True if the usage was out of bounds. `finish` says why the first choice ended.
    """

    usage: CallUsage | None = None
    usage_corrected: bool = False
    problem: str | None = None
    finish: str | None = None


class AnswerForm(Protocol):
    """One form of answers."""

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an answer that is not streamed; raises `EngineError` if it is not whole."""

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:
        """A reader of a stream that should have `choices` endings. `withhold` drops the usage-only event."""

    def error_event(self, error: PlaitError) -> bytes:
        """An error in a stream that has begun."""

    def waiting_event(self, position: int, expected_s: float) -> bytes:
        """What a stream is told while its call waits: its place among its tenant's calls, and the expected seconds."""


class CompletionForm:
    """Completions, chat and text."""

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an answer: each of its choices needs an ending."""
        body = decode_whole(answer)
        if body is None:
            raise garbled(engine_id, "an answer that is not JSON")
        usage, corrected = read_usage(body.usage, bounds)
        if body.error is not None:
            return WholeAnswer(usage, corrected, _caller_fault(engine_id, body.error))
        if not isinstance(body.choices, list) or not body.choices:
            raise garbled(engine_id, "an answer without choices")
        reasons = [reason for _, reason in endings(body)]
        missing = ending_problem(engine_id, reasons, len(body.choices))
        if missing is not None:
            raise missing
        return WholeAnswer(usage, corrected, finish=reasons[0])

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:
        """A reader of a stream of chunks."""
        return CompletionStream(engine_id, withhold=withhold, choices=choices, bounds=bounds)

    def error_event(self, error: PlaitError) -> bytes:
        """An event with OpenAI's error object."""
        return b"data: %b\n\n" % error.body()

    def waiting_event(self, position: int, expected_s: float) -> bytes:
        """A comment. Clients ignore comments, and so do proxies, except that they wait on."""
        return b": waiting position=%d expected_s=%d\n\n" % (position, round(expected_s))


class ResponseForm(CompletionForm):
    """Objects and events of `/v1/responses`."""

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an answer: it says that it is completed, or cut at its limit."""
        body = _object(engine_id, answer)
        usage, corrected = read_usage(usage_of_response(body.get("usage")), bounds)
        if body.get("error") is not None:
            return WholeAnswer(usage, corrected, _caller_fault(engine_id, body["error"]))
        if body.get("status") not in {"completed", "incomplete"}:
            raise garbled(engine_id, "a response that is not completed")
        return WholeAnswer(usage, corrected, finish=body["status"])

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:  # noqa: ARG002
        """A reader of a stream of typed events."""
        return ResponseStream(engine_id, bounds)


class MessageForm(CompletionForm):
    """Objects and events of `/v1/messages`."""

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an answer: it says why it stopped."""
        body = _object(engine_id, answer)
        usage, corrected = read_usage(usage_of_message(body.get("usage")), bounds)
        if body.get("type") == "error":
            return WholeAnswer(usage, corrected, _caller_fault(engine_id, body.get("error")))
        if body.get("stop_reason") is None:
            raise garbled(engine_id, "a message without a stop reason")
        return WholeAnswer(usage, corrected, finish=str(body["stop_reason"]))

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:  # noqa: ARG002
        """A reader of a stream of typed events."""
        return MessageStream(engine_id, bounds)

    def waiting_event(self, position: int, expected_s: float) -> bytes:
        """Anthropic's own sign of life, behind the comment."""
        return super().waiting_event(position, expected_s)[:-1] + b'event: ping\ndata: {"type": "ping"}\n\n'


class ObjectForm(CompletionForm):
    """Any JSON, such as embeddings, with or without a usage. Vectors may also come as bytes."""

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an answer. What is no JSON object has nothing that is read here."""
        body = said_of_object(answer)
        if body is None:
            return WholeAnswer()
        usage, corrected = read_usage(body.get("usage"), bounds)
        error = body.get("error")
        return WholeAnswer(usage, corrected, None if error is None else _caller_fault(engine_id, error))


COMPLETION, RESPONSE, MESSAGE, OBJECT = CompletionForm(), ResponseForm(), MessageForm(), ObjectForm()


def _object(engine_id: str, answer: bytes | bytearray) -> Json:
    body = said_of_object(answer)
    if body is None:
        raise garbled(engine_id, "an answer that is not a JSON object")
    return body


def _caller_fault(engine_id: str, error: object) -> str:
    """What an error in an answer says. Raises it if the engine is at fault."""
    reported = reported_error(engine_id, error)
    if isinstance(reported, EngineError):
        raise reported
    return reported
