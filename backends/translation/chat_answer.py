"""Reads an engine's chat completion, whole or as the chunks of a stream, tolerantly.

Engines differ in every field. A field of another type than OpenAI's is read as far as possible, and a field that is not
needed is never an error. Only the first choice is read, since OpenAI's responses and Anthropic's messages have no
choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from plait.backends.errors import EngineGarbledError
from plait.backends.protocol.json_constants import without_constants
from plait.backends.protocol.message_content import content_text, is_thought, text_of

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user. `logprobs` has one of OpenAI's objects for each token, if they were requested."""

    text: str
    logprobs: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The model's words instead of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call to a tool. `index` is None, or a text is empty, if the engine leaves it out."""

    index: int | None
    call_id: str
    name: str
    arguments: str


Piece = Reasoning | Text | Refusal | CallPiece


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. Prompt tokens include the cached ones, output tokens the reasoning."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class ChatAnswer(msgspec.Struct):
    """A `chat.completion` or one of its chunks, unchecked. `error` is OpenAI's error object, or a text."""

    model_name: Any = msgspec.field(default=None, name="model")
    choices: list[Any] | None = None
    usage_object: Any = msgspec.field(default=None, name="usage")
    error: Any = None

    @property
    def model(self) -> str:
        """The model that the engine names; empty if it names none."""
        return text_of(self.model_name)

    @property
    def choice(self) -> Object:
        """The first choice; an empty one if the answer has none."""
        for choice in self.choices or ():
            if isinstance(choice, dict) and not _count(choice.get("index")):
                return choice
        return {}

    @property
    def usage(self) -> Usage | None:
        counts = self.usage_object
        if not isinstance(counts, dict):
            return None
        prompt, output = _object(counts.get("prompt_tokens_details")), _object(counts.get("completion_tokens_details"))
        return Usage(
            _count(counts.get("prompt_tokens")),
            _count(counts.get("completion_tokens")),
            _count(prompt.get("cached_tokens")),
            _count(output.get("reasoning_tokens")),
        )


def finish_reason(choice: Object) -> str:
    """Why the turn has ended; empty if it has not. Some engines send an object with a `type`."""
    reason = choice.get("finish_reason")
    return text_of(reason.get("type") if isinstance(reason, dict) else reason)


def stop_string(choice: Object) -> str | None:
    """The stop string that ended the turn. vLLM and SGLang name it; other engines do not."""
    stops = (choice.get("stop_reason"), choice.get("matched_stop"))
    return next((stop for stop in stops if isinstance(stop, str)), None)


def pieces(choice: Object) -> Iterator[Piece]:
    """The choice's reasoning, text, refusal and calls, in this order. An engine may repeat a `delta` in `message`."""
    delta = choice.get("delta")
    message = delta if isinstance(delta, dict) else _object(choice.get("message"))
    if not message:
        return
    content, thought = message.get("content"), message.get("reasoning") or message.get("reasoning_content")
    logprobs = choice.get("logprobs")
    if isinstance(content, list):
        thought = thought or [part for part in content if is_thought(part)]
    if thought and (text := text_of(thought)):
        yield Reasoning(text)
    tokens = () if logprobs is None else _objects(_object(logprobs).get("content"))
    if (text := content if isinstance(content, str) else content_text(content)) or tokens:
        yield Text(text, tokens)
    if (refusal := message.get("refusal")) and (text := text_of(refusal)):
        yield Refusal(text)
    if calls := message.get("tool_calls"):
        yield from map(_call_piece, _objects(calls))
    elif function := message.get("function_call"):  # OpenAI's form before `tool_calls`
        yield from (_call_piece({"index": 0, "function": call}) for call in _objects(function))


def only_text(answer: ChatAnswer) -> Text | Reasoning | None:
    """The text or the thought of an event that has nothing else; None for any other event."""
    choice = answer.choice
    if len(answer.choices or ()) != 1 or answer.usage_object is not None or finish_reason(choice):
        return None
    match [*pieces(choice)]:
        case [Text(_, ()) | Reasoning(_) as only] if stop_string(choice) is None:
            return only
        case _:
            return None


_DECODER: Final = msgspec.json.Decoder(ChatAnswer)


def read_answer(body: bytes) -> ChatAnswer:
    """A whole answer, or the data of an event. Raises EngineGarbledError if it is neither."""
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        document = without_constants(body)
        if document is None:
            raise EngineGarbledError(f"The engine's answer is not a chat completion: {error}") from error
        return read_answer(document)


def _count(value: object) -> int:
    """A number of tokens, or an index; 0 for any other value."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 18:
        return int(value)
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**53 else 0


def _object(value: object) -> Object:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> tuple[dict[str, Any], ...]:
    """The objects of a list; one that stands alone is a list of its own."""
    if isinstance(value, dict):
        return (value,)
    return tuple(item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def _call_piece(call: Object) -> CallPiece:
    """Some engines put the function's fields beside the call's `id`. Some send the arguments as an object."""
    function, index = call.get("function"), call.get("index")
    if not isinstance(function, dict):
        function = call
    name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else msgspec.json.encode(arguments).decode()
    if not isinstance(call_id, str):
        call_id = str(call_id) if isinstance(call_id, int) else ""
    return CallPiece(
        None if index is None else _count(index), call_id, name if isinstance(name, str) else "", arguments
    )
