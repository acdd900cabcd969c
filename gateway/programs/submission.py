"""A submitted prompt: constant texts, inputs and outputs in order, run as fill / generate / fill / generate.

This is Parrot's interface for whole prompts (sections 4.1 and 7). The prompt may also be the messages of a chat. Each
output is generated from the text before it, on the engine that already has that text in its cache.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, check_request, decode_body, parse_request
from plait.gateway.calls.annotations import SESSION_ID, VARIABLE_NAME
from plait.gateway.calls.routes import CHAT_PATH, KINDS, TEXT_PATH
from plait.gateway.programs.filled_prompts import PLACEHOLDER, filled_bytes, filled_message, message_texts, sizes_of
from plait.gateway.programs.held_call import Output
from plait.gateway.transforms import parse

Message = Mapping[str, Any]
"""A chat message as it was sent, or a raw prompt as the content of a message without a role."""

VariableName = Annotated[str, Meta(pattern=rf"^{VARIABLE_NAME}\Z")]
SessionId = Annotated[str, Meta(pattern=rf"^{SESSION_ID}\Z")]
TimeToLive = Annotated[float, Meta(gt=0, le=7 * 86_400.0)]
"""Of a session, in seconds."""

Fields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the prompt, or all of a raw prompt, and the placeholders in it where text is generated.

    `outputs` maps their positions to their names. Every other placeholder is replaced by its variable's
    value, even if the variable is an output.
    """

    message: Message
    outputs: Mapping[int, str]

    def filled(self, values: Mapping[str, str], generated: Mapping[str, str]) -> Message:
        """The whole message, filled with `values` and `generated` texts, both by placeholder name."""
        if not self.outputs:
            return filled_message(self.message, values)
        return {**self.message, "content": self.begun(None, values, generated)}

    def begun(self, end: int | None, values: Mapping[str, str], generated: Mapping[str, str]) -> str:
        """The filled text up to the output that begins at `end` (None: all of it).

        Earlier outputs are filled with the model's own text, before transforms.
        """

        def text(match: re.Match[str]) -> str:
            output = self.outputs.get(match.start())
            return values.get(match[1], match[0]) if output is None else generated[output]

        return PLACEHOLDER.sub(text, self.message["content"][:end])

    def filled_bytes(self, end: int | None, values: Mapping[str, int], generated: Mapping[str, int]) -> int:
        """The bytes of text in what `filled` (`end` is None) or `begun` makes of values and texts of these sizes."""
        if not self.outputs:
            return sum(filled_bytes(text, values) for text in message_texts(self.message))
        places = {place: generated[output] for place, output in self.outputs.items() if output in generated}
        return filled_bytes(self.message["content"][:end], values, places)


def turns(messages: Iterable[Message], outputs: Collection[str]) -> Iterator[Turn]:
    """The turns of a prompt. Each of `outputs` is generated at its first placeholder.

    Raises `CallerError` for an output outside the assistant's messages, or in one part of a message's content.
    """
    generated = set[str]()
    for index, message in enumerate(messages):
        places: dict[int, str] = {}
        for match in placeholders(message):
            if match[1] in outputs and match[1] not in generated:
                _check_place(message, index, match[0])
                generated.add(match[1])
                places[match.start()] = match[1]
        yield Turn(message, places)


def placeholders(message: Message) -> Iterator[re.Match[str]]:
    """The placeholders in a message's texts, in their order."""
    return (match for text in message_texts(message) for match in PLACEHOLDER.finditer(text))


def _check_place(message: Message, index: int, output: str) -> None:
    if message.get("role", "assistant") != "assistant":
        said = f"{output} is an output in a message with the role '{message['role']}'"
    elif not isinstance(message["content"], str):
        said = f"{output} is an output in a part of the content; the content has to be one text"
    else:
        return
    raise CallerError(f"messages[{index}]: {said}; outputs have to be in messages of the assistant.", param="messages")


class Placeholder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The meaning of `{{name}}` in the prompt: an output of this call if `in_out`, else an input.

    `params` are request fields for this output only. `transforms` is a chain, as text or as a list. `truncated` says
    whether a text that ends at its length limit becomes the value or fails the variable.
    """

    name: VariableName
    in_out: bool = False
    semantic_var_id: VariableName | None = None
    transforms: str | list[Any] | None = None
    params: Fields | None = None
    truncated: Literal["keep", "fail"] = "keep"

    @property
    def variable(self) -> str:
        """The variable's name in the session."""
        return self.semantic_var_id or self.name

    def output(self) -> Output:
        """The variable and its transform; raises `TransformSpecError`."""
        transform = parse(self.transforms) if self.transforms else None
        return Output(self.variable, transform, must_be_whole=self.truncated == "fail")


class CallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted call, without the fields that go to the engine as they are: one of a program's `calls`."""

    model: str
    placeholders: Sequence[Placeholder]
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat: bool = True
    when: str | None = None
    plait: dict[str, Any] | None = None


class SubmitBody(CallBody, frozen=True, kw_only=True):
    """`POST /v1/submit`."""

    session_id: SessionId


_FIELDS_DECODER = msgspec.json.Decoder(Fields)
SET_FOR_EACH_STEP = frozenset(("stream", "stream_options", "n", "add_generation_prompt", "continue_final_message"))
"""Fields that Plait sets in the request for each output, whatever the submission says."""

_NOT_FORWARDED = SET_FOR_EACH_STEP.union(SubmitBody.__struct_fields__)


_ANY_PROMPT: Mapping[str, Any] = {"prompt": "", "messages": [{"role": "user", "content": ""}]}
"""A dummy prompt, used where only the other fields matter."""


@dataclass(frozen=True, slots=True)
class OutputStep:
    """One output: its placeholder's name, its turn's number, its position in that turn, and its own request fields."""

    name: str
    output: Output
    turn: int
    end: int
    fields: Fields


class Submission:
    """A submitted prompt, checked. Raises `CallerError` if it could not run whatever its inputs are.

    `body` is decoded from `raw`, which has the fields for the engine as well. `fields` are the names of all fields.
    `undeclared` are the names that stand in the prompt as placeholders, without being among `placeholders`.
    """

    def __init__(self, raw: bytes, body: CallBody) -> None:
        self.body = body
        self._placeholders = {placeholder.name: placeholder for placeholder in self.body.placeholders}
        if len(self._placeholders) < len(self.body.placeholders):
            raise _at_fault("two placeholders have the same name; each name may be given once")
        fields = decode_body(raw, _FIELDS_DECODER)
        self.fields = fields.keys()
        self._fields = _forwarded(fields)
        self.path = CHAT_PATH if self.body.chat else TEXT_PATH
        outputs = {placeholder.name for placeholder in self.body.placeholders if placeholder.in_out}
        messages = _messages(self.body, outputs)
        self.undeclared = self._check_names(messages)
        self._turns = tuple(turns(messages, outputs))
        self.steps = tuple(self._steps())
        self._check_ends()
        limits = [self._request(step, _ANY_PROMPT)[1].output_limit for step in self.steps]
        self.output_tokens = None if None in limits else sum(limit for limit in limits if limit is not None)

    @property
    def characters(self) -> int:
        """The prompt's length before its placeholders are filled."""
        return sum(len(text) for turn in self._turns for text in message_texts(turn.message))

    @property
    def field(self) -> str:
        """The field that the prompt comes from."""
        return "prompt" if self.body.messages is None else "messages"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The variables that the call takes, each once."""
        return tuple({one.variable: None for one in self._placeholders.values() if not one.in_out})

    def request(
        self, step: OutputStep, values: Mapping[str, str], generated: Mapping[str, str]
    ) -> tuple[bytes, ChatRequest | CompletionRequest]:
        """The request for one output. `values` are by variable; the texts `generated` for earlier outputs are by
        placeholder name.
        """
        named = {name: values[one.variable] for name, one in self._placeholders.items() if one.variable in values}
        *before, turn = self._turns[: step.turn + 1]
        begun = turn.begun(step.end, named, generated)
        if not self.body.chat:
            return self._request(step, {"prompt": begun})
        messages = [earlier.filled(named, generated) for earlier in before]
        if not begun:
            return self._request(step, {"messages": messages})
        messages.append({**turn.message, "content": begun})
        going_on = {"add_generation_prompt": False, "continue_final_message": True}
        return self._request(step, {"messages": messages, **going_on})

    def filled_sizes(self, step: OutputStep, values: Mapping[str, str], generated: Mapping[str, str]) -> list[int]:
        """The bytes of text in the prompt that `request` makes of these."""
        sizes, texts = sizes_of(values), sizes_of(generated)
        named = {name: sizes[one.variable] for name, one in self._placeholders.items() if one.variable in sizes}
        *before, turn = self._turns[: step.turn + 1]
        sizes_before = (earlier.filled_bytes(None, named, texts) for earlier in before)
        return [sum(sizes_before, turn.filled_bytes(step.end, named, texts))]

    def unfilled(self, step: OutputStep) -> ChatRequest | CompletionRequest:
        """The request for one output before there are values: each placeholder becomes `{{name}}` of its variable."""
        places = {name: f"{{{{{one.variable}}}}}" for name, one in self._placeholders.items()}
        values = {one.variable: places[name] for name, one in self._placeholders.items()}
        return self.request(step, values, places)[1]

    @property
    def opening(self) -> ChatRequest | CompletionRequest:
        """The request for the first output before there are values: each input becomes `{{name}}` of its variable."""
        return self.request(self.steps[0], {name: f"{{{{{name}}}}}" for name in self.inputs}, {})[1]

    def _request(self, step: OutputStep, prompt: Mapping[str, Any]) -> tuple[bytes, ChatRequest | CompletionRequest]:
        fields = {**self._fields, **step.fields, "model": self.body.model, "stream": True, **prompt}
        body = msgspec.json.encode(fields)
        request = parse_request(body, KINDS[self.path])
        check_request(request)
        return body, request

    def _steps(self) -> Iterator[OutputStep]:
        for number, turn in enumerate(self._turns):
            for end, name in turn.outputs.items():
                placeholder = self._placeholders[name]
                yield OutputStep(name, placeholder.output(), number, end, _forwarded(placeholder.params or {}))

    def _check_names(self, messages: Sequence[Message]) -> set[str]:
        """Raise for a placeholder that is not in the prompt; the names in the prompt that are no placeholders."""
        found = {match[1] for message in messages for match in placeholders(message)}
        unused = self._placeholders.keys() - found
        if unused:
            raise _at_fault(
                f"the prompt does not contain {', '.join(sorted(unused))}; write each as {{{{name}}}} in it"
            )
        return found - self._placeholders.keys()

    def _check_ends(self) -> None:
        if not self.steps:
            raise _at_fault("no placeholder is an output; set 'in_out' to true for each text to generate")
        first, behind = self.steps[0], self.steps[-1].turn + 1
        if self.body.chat and (first.turn, first.end) == (0, 0):
            raise CallerError("messages[0] begins with an output; put a message before it.", param="messages")
        if behind < len(self._turns):
            message = f"messages[{behind}] comes after the last output, so it would have no effect; remove it."
            raise CallerError(message, param="messages")


def _messages(body: CallBody, outputs: Collection[str]) -> list[Message]:
    """The prompt as messages.

    A single text is split at its first output: the user's message, then the model's. A raw prompt (`chat` false) is one
    text without a role.
    """
    if (body.prompt is None) == (body.messages is None):
        raise CallerError("A submission needs either 'prompt' or 'messages', and not both.", param="prompt")
    if body.messages is not None:
        if not body.chat:
            raise CallerError("'chat' cannot be false with 'messages'; send 'prompt' for a raw prompt.", param="chat")
        for index, message in enumerate(body.messages):
            if not isinstance(message.get("role"), str):
                raise CallerError(f"messages[{index}] has no 'role'; give one, such as 'user'.", param="messages")
        return list(body.messages)
    assert body.prompt is not None
    if not body.chat:
        return [{"content": body.prompt}]
    first = next((match.start() for match in PLACEHOLDER.finditer(body.prompt) if match[1] in outputs), None)
    asked, answered = body.prompt[:first], "" if first is None else body.prompt[first:]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def _forwarded(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name not in _NOT_FORWARDED}


def _at_fault(message: str) -> CallerError:
    return CallerError(f"'placeholders': {message}.", param="placeholders")
