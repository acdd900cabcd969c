"""Reads the answers of chat completions, whole ones and chunks, into the parts that an assistant's turn is made of.

Only the first choice is read: the other APIs have no choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from plait.backends.errors import EngineGarbledError


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
