"""The translator of one answer: reads chat completions, lets the API's turn grow, and writes what the turn says.

Whole answers and chunks become the parts that an assistant's turn is made of. Only the first choice is read: the other
APIs have no choices.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from plait.backends.errors import EngineError, EngineGarbledError


@dataclass(frozen=True, slots=True)
class Identity:
    """`key` makes the ids of an answer and of its parts. `created_s` is the Unix time."""

    key: str
    created_s: int


def new_identity() -> Identity:
    """A key that no other answer has, and the present. It is the only place of this room that is not pure."""
    return Identity(uuid.uuid4().hex, int(time.time()))


Event = Mapping[str, Any]
"""The data of an event. Its `type` is also the event's name."""


def read_events(events: bytes) -> Iterator[tuple[list[bytes], bytes | None]]:
    """The comments and the data of each event. The data is None if the event has none, or an empty one."""
    lines = events.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for event in lines.split(b"\n\n"):
        comments, data = list[bytes](), list[bytes]()
        for line in event.split(b"\n"):
            if line.startswith(b":"):
                comments.append(line)
            elif line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
        said = b"\n".join(data).strip()
        if comments or said:
            yield comments, said or None


def write_comments(comments: Iterable[bytes]) -> bytes:
    """Comments as an event without data; no bytes without comments."""
    lines = b"\n".join(comments)
    return lines + b"\n\n" if lines else b""


def write_event(event: Event) -> bytes:
    """An event with its name."""
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), msgspec.json.encode(event))


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user. `logprobs` are OpenAI's objects, one a token; none if they were not requested."""

    text: str
    logprobs: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The model's words instead of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A part of a call. `index` says which call of the turn. The first part of a call has its id and its name."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


Part = Reasoning | Text | Refusal | ToolCall


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. The prompt's tokens include the cached ones, the output's include those of reasoning."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprobs(msgspec.Struct):
    content: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class ChatAnswer(msgspec.Struct):
    """A `chat.completion`, or one of its chunks. `error` is OpenAI's error object, or a text."""

    model: str = ""
    choices: list[_Choice] = []
    usage_object: _Usage | None = msgspec.field(default=None, name="usage")
    error: Any = None

    @property
    def finish_reason(self) -> str | None:
        """Why the turn has ended; None if it has not, or if the answer does not say."""
        return next((choice.finish_reason for choice in self._first()), None)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the turn. vLLM and SGLang name it; other engines do not."""
        for choice in self._first():
            for stop in (choice.stop_reason, choice.matched_stop):
                if isinstance(stop, str):
                    return stop
        return None

    @property
    def usage(self) -> Usage | None:
        """The counts, if the answer has them."""
        counts = self.usage_object
        if counts is None:
            return None
        prompt, output = counts.prompt_tokens_details, counts.completion_tokens_details
        return Usage(
            counts.prompt_tokens or 0,
            counts.completion_tokens or 0,
            (prompt.cached_tokens if prompt else None) or 0,
            (output.reasoning_tokens if output else None) or 0,
        )

    def parts(self) -> Iterator[Part]:
        """What the answer adds to the turn, in the order reasoning, text, calls."""
        for choice in self._first():
            message = choice.delta or choice.message or _Message()
            if thought := message.reasoning or message.reasoning_content:
                yield Reasoning(thought)
            logprobs = tuple((choice.logprobs and choice.logprobs.content) or ())
            if message.content or logprobs:
                yield Text(message.content or "", logprobs)
            if message.refusal:
                yield Refusal(message.refusal)
            for position, call in enumerate(message.tool_calls or ()):
                function = call.function or _Function()
                index = position if call.index is None else call.index
                yield ToolCall(index, call.id, function.name, function.arguments or "")

    def _first(self) -> Iterator[_Choice]:
        return (choice for choice in self.choices if choice.index == 0)


_DECODER = msgspec.json.Decoder(ChatAnswer)


def read_answer(body: bytes) -> ChatAnswer:
    """A whole answer, or the data of an event. Raises EngineGarbledError if it is neither."""
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineGarbledError(f"The engine's answer is not a chat completion: {error}") from error


DONE = b"[DONE]"


class Turn(Protocol):
    """An assistant's turn in one API. Each method returns the events that tell a client of the change."""

    def begin(self, model: str) -> Iterable[Event]:
        """The turn's first events. `model` is the one that the engine names."""
        ...

    def wait(self) -> Iterable[Event]:
        """Tell that the turn goes on, although nothing comes. The turn may not have begun."""
        ...

    def take(self, part: Part) -> Iterable[Event]:
        """Add a part."""
        ...

    def end(self, finish_reason: str | None, stop: str | None, usage: Usage) -> Iterable[Event]:
        """End the turn. `finish_reason` is OpenAI's; `stop` is the stop string that was found."""
        ...

    def fail(self, error: Mapping[str, Any]) -> Iterable[Event]:
        """End the turn with OpenAI's error object. The turn may not have begun."""
        ...

    def answer(self) -> dict[str, Any]:
        """The answer's object, as far as the turn has come."""
        ...


class TurnTranslator:
    """Implements AnswerTranslator over a turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._begun = False
        self._ended = False
        self._finish_reason: str | None = None
        self._stop: str | None = None
        self._usage = Usage()

    def whole(self, answer: bytes) -> bytes:
        """The answer's object for a `chat.completion`. Raises EngineGarbledError if it is none."""
        read = read_answer(answer)
        if not read.choices:
            raise EngineGarbledError("The engine's answer is not a chat completion: it has no choices.")
        self._take(read)
        self._end()
        return msgspec.json.encode(self._turn.answer())

    def feed(self, events: bytes) -> bytes:
        """The turn's events for whole events of a chat stream."""
        written = bytearray()
        for comments, data in read_events(events):
            written += write_comments(comments)
            for event in () if self._ended else self._turn.wait() if data is None else self._events(data):
                written += write_event(event)
        return bytes(written)

    def _events(self, data: bytes) -> list[Event]:
        if data.strip() == DONE:
            return self._end()
        try:
            return self._take(read_answer(data))
        except EngineError as error:
            return self._fail(error.error_object)

    def _take(self, answer: ChatAnswer) -> list[Event]:
        if answer.error is not None:
            error = answer.error
            return self._fail(error if isinstance(error, dict) else {"message": str(error)})
        events = list[Event]() if self._begun else list(self._turn.begin(answer.model))
        self._begun = True
        for part in answer.parts():
            events += self._turn.take(part)
        self._finish_reason = answer.finish_reason or self._finish_reason
        self._stop = answer.stop or self._stop
        self._usage = answer.usage or self._usage
        return events

    def _end(self) -> list[Event]:
        events = list[Event]() if self._begun else list(self._turn.begin(""))
        self._begun = self._ended = True
        return [*events, *self._turn.end(self._finish_reason, self._stop, self._usage)]

    def _fail(self, error: Mapping[str, Any]) -> list[Event]:
        self._ended = True
        return list(self._turn.fail(error))
