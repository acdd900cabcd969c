"""A submitted prompt: constant texts, inputs and outputs in order, run as fill / generate / fill / generate.

This is Parrot's interface for whole prompts (sections 4.1 and 7). The prompt may also be the messages of a chat. Each
output is generated from the text before it, preferably on the engine that has this text in its cache. `/v1/submit` and
`/v1/programs` use it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, Request, check_request, parse_request
from plait.gateway.calls.routes import CHAT_PATH, KINDS, TEXT_PATH
from plait.gateway.guests.programs.core.held_call import Output
from plait.gateway.guests.programs.filled_prompts import (
    PLACEHOLDER,
    Unfilled,
    filled_bytes,
    filled_message,
    message_texts,
    sizes_of,
)
from plait.gateway.guests.programs.transforms import parse
from plait.gateway.ids import SESSION_ID, VARIABLE_NAME

Message = Mapping[str, Any]
"""A chat message as it was sent, or a raw prompt as the content of a message without a role."""

VariableName = Annotated[str, Meta(pattern=rf"^{VARIABLE_NAME.pattern}\Z")]
SessionId = Annotated[str, Meta(pattern=rf"^{SESSION_ID.pattern}\Z")]
TimeToLive = Annotated[float, Meta(gt=0, le=7 * 86_400.0)]
"""Seconds."""

LEAST_TOKENS: Final = 16
"""With a lower output limit, a space before an output stays in the prompt. If the model wrote it, the space could be a
token of its own before a digit, and the limit would cut a short number."""

Fields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the prompt, or a whole raw prompt.

    `outputs` maps the position of each placeholder where text is generated to its name. Any other placeholder is
    replaced by its variable's value, even if the variable is an output.
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

        Earlier outputs are filled with the generated texts, not with the values after transforms: these texts are in
        the engine's cache.
        """

        def text(match: re.Match[str]) -> str:
            output = self.outputs.get(match.start())
            return values.get(match[1], match[0]) if output is None else generated[output]

        return PLACEHOLDER.sub(text, self.message["content"][:end])

    def filled_bytes(self, end: int | None, values: Mapping[str, int], generated: Mapping[str, int]) -> int:
        """The bytes of text that `filled` (`end` is None) or `begun` would make of texts of these sizes."""
        if not self.outputs:
            return sum(filled_bytes(text, values) for text in message_texts(self.message))
        places = {place: generated[output] for place, output in self.outputs.items() if output in generated}
        return filled_bytes(self.message["content"][:end], values, places)


def _misplaced(message: Message, index: int, output: str) -> CallerError | None:
    """The error of an output outside the assistant's messages, or in a message whose content has several parts."""
    if message.get("role", "assistant") != "assistant":
        said = f"{output} is an output in a message with the role '{message['role']}'"
    elif not isinstance(message["content"], str):
        said = f"{output} is an output in a part of the content; the content has to be one text"
    else:
        return None
    return CallerError(f"messages[{index}]: {said}; outputs have to be in messages of the assistant.", param="messages")


class Placeholder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The meaning of `{{name}}` in the prompt."""

    name: VariableName
    in_out: bool = False
    """Whether it is an output of this call; else it is an input."""
    semantic_var_id: VariableName | None = None
    """The variable's name, if it differs from `name`."""
    transforms: str | list[str] | None = None
    """A chain of transforms, as one text or in parts."""
    params: Fields | None = None
    """Request fields for this output only."""
    truncated: Literal["keep", "fail"] = "keep"
    """Whether a text that was cut at the output limit becomes the value, or fails the variable."""

    @property
    def variable(self) -> str:
        return self.semantic_var_id or self.name

    def output(self) -> Output:
        """The variable and its transform; raises `TransformSpecError`."""
        chain = " | ".join(self.transforms) if isinstance(self.transforms, list) else self.transforms
        transform = parse(chain) if chain else None
        return Output(self.variable, transform, must_be_whole=self.truncated == "fail")


class CallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted call: the fields that the gateway interprets. All others go to the engine."""

    model: str
    placeholders: Sequence[Placeholder]

    prompt: str | None = None
    """Either this or `messages`."""

    messages: list[dict[str, Any]] | None = None

    chat: bool = True
    """Whether `prompt` is a chat: the text up to the first output is the user's, the rest the model's."""

    when: str | None = None
    """The call is skipped if this condition does not hold."""

    plait: dict[str, Any] | None = None
    """Annotations other than those that are fields here."""


class SubmitBody(CallBody, frozen=True, kw_only=True):
    """`POST /v1/submit`."""

    session_id: SessionId


CALL_BODY: Final = msgspec.json.Decoder(CallBody)
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
    """A submitted prompt, checked. Raises `CallerError` if it could not run with any inputs.

    `body` is decoded from `raw`, which also has the fields for the engine. `fields`: the names of all fields.
    `undeclared`: placeholders in the prompt that `placeholders` lacks. `inputs`: the variables that the call waits for,
    each once. `characters`: the length of the prompt before it is filled.
    """

    def __init__(self, raw: bytes, body: CallBody) -> None:
        self.body = body
        self._placeholders = {placeholder.name: placeholder for placeholder in self.body.placeholders}
        if len(self._placeholders) < len(self.body.placeholders):
            raise _at_fault("two placeholders have the same name; each name may be given once")
        fields = _FIELDS_DECODER.decode(raw)  # cannot fail: `body` was decoded from it
        self.fields = fields.keys()
        self._fields = _forwarded(fields)
        self.path = CHAT_PATH if self.body.chat else TEXT_PATH
        outputs = {placeholder.name for placeholder in self.body.placeholders if placeholder.in_out}
        self.characters = 0
        self._turns, self.undeclared = self._made_turns(_messages(self.body, outputs), outputs)
        self.steps = self._made_steps()
        self._check_ends()
        self._checked: dict[str, ChatRequest | CompletionRequest] = {}
        self._spaces: dict[str, str] = {}
        limits = list[int | None]()
        for step in self.steps:
            request = self._checked[step.name] = self._checked_request(step)
            self._spaces[step.name] = " " if self._leaves_space(step, request) else ""
            limits.append(request.output_limit)
        self.output_tokens = None if None in limits else sum([limit for limit in limits if limit is not None])
        self._variables = {name: one.variable for name, one in self._placeholders.items()}
        inputs = [self._variables[name] for name in self._placeholders if name not in outputs]
        self.inputs = tuple(dict.fromkeys(inputs))

    @property
    def model(self) -> str:
        return self.body.model

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(step.output for step in self.steps)

    @property
    def field(self) -> str:
        return "prompt" if self.body.messages is None else "messages"

    @property
    def templated(self) -> ChatRequest | CompletionRequest | None:
        """The request for the first output, with a dummy prompt; None if it has no chat template of its own."""
        first = self.steps[0]
        has_template = "chat_template" in self._fields or "chat_template" in first.fields
        return self._checked[first.name] if has_template else None

    def request(
        self, step: OutputStep, values: Mapping[str, str], generated: Mapping[str, str]
    ) -> tuple[bytes, ChatRequest | CompletionRequest]:
        """The request for one output. `values`: by variable. `generated`: texts by placeholder of earlier outputs."""
        named = {name: values[variable] for name, variable in self._variables.items() if variable in values}
        *before, turn = self._turns[: step.turn + 1]
        begun = turn.begun(self._end(step), named, generated)
        prompt: dict[str, Any] = {"prompt": begun}
        if self.body.chat:
            messages = [earlier.filled(named, generated) for earlier in before]
            prompt = {"messages": messages}
            if begun:
                messages.append({**turn.message, "content": begun})
                prompt |= {"add_generation_prompt": False, "continue_final_message": True}
        return self._body(step, prompt), msgspec.structs.replace(self._checked[step.name], **prompt)

    def filled_sizes(self, step: OutputStep, values: Mapping[str, str], generated: Mapping[str, str]) -> list[int]:
        """The bytes of text in the prompt that `request` would make."""
        sizes, texts = sizes_of(values), sizes_of(generated)
        named = {name: sizes[variable] for name, variable in self._variables.items() if variable in sizes}
        *before, turn = self._turns[: step.turn + 1]
        sizes_before = (earlier.filled_bytes(None, named, texts) for earlier in before)
        return [sum(sizes_before, turn.filled_bytes(self._end(step), named, texts))]

    def unfilled(self, number: int, values: Mapping[str, str], texts: Sequence[str]) -> Unfilled:
        """The prompt of an output. `values`: by variable. `texts`: those of the outputs before it."""
        step = self.steps[number]
        generated = {earlier.name: text for earlier, text in zip(self.steps, texts, strict=False)}
        return Unfilled(
            self.body.model,
            self.field,
            partial(self.filled_sizes, step, values, generated),
            partial(self.request, step, values, generated),
        )

    def space(self, number: int) -> str:
        """A space before the output that is left out of the prompt, for the model to write; else empty.

        Tokenizers join a space to the word behind it. If the prompt ended with the space, the generated tokens would
        differ from those of the whole text, so that the next step would miss them in the cache.
        """
        return self._spaces[self.steps[number].name]

    def _end(self, step: OutputStep) -> int:
        """Where the step's prompt ends in its turn."""
        return step.end - len(self._spaces[step.name])

    def _leaves_space(self, step: OutputStep, request: Request) -> bool:
        """Whether the text before an output ends with a space that the model may write instead."""
        before = self._turns[step.turn].message["content"][: step.end]
        has_space = before.endswith(" ") and bool(PLACEHOLDER.sub("", before).strip())
        return has_space and _may_begin_with_space(request)

    def _checked_request(self, step: OutputStep) -> ChatRequest | CompletionRequest:
        """The request for an output, with a dummy prompt. Raises `CallerError` if an engine would refuse it."""
        request = parse_request(self._body(step, _ANY_PROMPT), KINDS[self.path])
        check_request(request)
        return request

    def _body(self, step: OutputStep, prompt: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode({**self._fields, **step.fields, "model": self.body.model, "stream": True, **prompt})

    def _made_turns(
        self, messages: Sequence[Message], outputs: Collection[str]
    ) -> tuple[tuple[Turn, ...], Collection[str]]:
        """The turns, and the names in the prompt that are undeclared. An output is generated at its first place.

        Raises `CallerError` for a placeholder that is not in the prompt, or an output where no text can be generated.
        """
        turns, names, misplaced = list[Turn](), set[str](), None
        for index, message in enumerate(messages):
            places: dict[int, str] = {}
            for text in message_texts(message):
                self.characters += len(text)
                for match in PLACEHOLDER.finditer(text):
                    name = match[1]
                    if name in outputs and name not in names:
                        misplaced = misplaced or _misplaced(message, index, match[0])
                        places[match.start()] = name
                    names.add(name)
            turns.append(Turn(message, places))
        unused = self._placeholders.keys() - names
        if unused:
            raise _at_fault(
                f"the prompt does not contain {', '.join(sorted(unused))}; write each as {{{{name}}}} in it"
            )
        if misplaced is not None:
            raise misplaced
        return tuple(turns), names - self._placeholders.keys()

    def _made_steps(self) -> tuple[OutputStep, ...]:
        steps = []
        for number, turn in enumerate(self._turns):
            for end, name in turn.outputs.items():
                one = self._placeholders[name]
                steps.append(OutputStep(name, one.output(), number, end, _forwarded(one.params or {})))
        return tuple(steps)

    def _check_ends(self) -> None:
        if not self.steps:
            raise _at_fault("no placeholder is an output; set 'in_out' to true for each text to generate")
        first, behind = self.steps[0], self.steps[-1].turn + 1
        if self.body.chat and (first.turn, first.end) == (0, 0):
            raise CallerError("messages[0] begins with an output; put a message before it.", param="messages")
        if behind < len(self._turns):
            message = f"messages[{behind}] comes after the last output, so it would have no effect; remove it."
            raise CallerError(message, param="messages")


def _may_begin_with_space(request: Request) -> bool:
    """Whether a leading space changes nothing in the answer.

    A stop string or a grammar may match the space, and under a low output limit the space may take a token.
    """
    limit, stop = request.output_limit, [request.stop] if isinstance(request.stop, str) else request.stop or []
    is_long = limit is None or limit >= LEAST_TOKENS
    return is_long and not request.has_grammar and not any(text[:1].isspace() for text in stop)


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
