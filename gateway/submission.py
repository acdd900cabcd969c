"""A submitted prompt: constant texts, inputs and outputs in order, run as fill / generate / fill / generate.

Parrot's interface for whole prompts (sections 4.1 and 7): each output is generated behind all that stands before it,
on the engine that has this in its cache already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from backends.errors import CallerError
from backends.openai_protocol import ChatRequest, CompletionRequest, decode_body, parse_request
from gateway.call_reader import CHAT_PATH, KINDS, TEXT_PATH
from gateway.held_call import Output
from gateway.sessions import NAME_PATTERN, SESSION_ID_PATTERN
from gateway.substitution import PLACEHOLDER
from gateway.transforms import Transform, parse

VariableName = Annotated[str, Meta(pattern=NAME_PATTERN)]
SessionId = Annotated[str, Meta(pattern=SESSION_ID_PATTERN)]
Fields = dict[str, msgspec.Raw]


class Placeholder(msgspec.Struct, frozen=True):
    """What `{{name}}` in the prompt stands for: an output of this call if `in_out`, else an input.

    `params` are the request fields of this output only; `transforms` is a chain as text, or a list.
    """

    name: VariableName
    in_out: bool = False
    semantic_var_id: VariableName | None = None
    transforms: str | list[Any] | None = None
    params: Fields | None = None

    @property
    def variable(self) -> str:
        """The variable's name in the session."""
        return self.semantic_var_id or self.name

    def transform(self) -> Transform | None:
        """The chain, if there is one; raises `TransformSpecError`."""
        return parse(self.transforms) if self.transforms else None


class SubmitBody(msgspec.Struct, frozen=True):
    """`POST /v1/submit`, without the fields that go to the engine as they are."""

    session_id: SessionId
    model: str
    prompt: str
    placeholders: list[Placeholder]
    chat: bool = True
    plait: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(SubmitBody)
_FIELDS_DECODER = msgspec.json.Decoder(Fields)
# Ours, or set for each step.
_NOT_FORWARDED = frozenset(
    (*SubmitBody.__struct_fields__, "stream", "stream_options", "n", "messages", "add_generation_prompt",
     "continue_final_message")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One output, and what stands between it and the output before: texts and names of variables, in turn."""

    fill: tuple[str, ...]
    output: Output
    fields: Fields

    def filled(self, values: Mapping[str, str]) -> str:
        """The text before the output; `values` of all variables in it."""
        return "".join(values[part] if index % 2 else part for index, part in enumerate(self.fill))


class Submission:
    """A submitted prompt, checked. Raises `CallerError` for one that cannot be run whatever its inputs are."""

    def __init__(self, raw: bytes) -> None:
        self.body = decode_body(raw, _DECODER)
        self._placeholders = {placeholder.name: placeholder for placeholder in self.body.placeholders}
        if len(self._placeholders) < len(self.body.placeholders):
            raise _at_fault("two placeholders have the same name")
        fields = decode_body(raw, _FIELDS_DECODER)
        self._fields = {name: value for name, value in fields.items() if name not in _NOT_FORWARDED}
        self.path = CHAT_PATH if self.body.chat else TEXT_PATH
        self.steps = tuple(self._steps())
        limits = [self.request(step, "-", "")[1].output_limit for step in self.steps]
        self.output_tokens = None if None in limits else sum(limit for limit in limits if limit is not None)
        unused = self._placeholders.keys() - {match[1] for match in PLACEHOLDER.finditer(self.body.prompt)}
        if unused:
            raise _at_fault(f"the prompt does not have {', '.join(sorted(unused))}")
        if not self.steps:
            raise _at_fault("none is an output: set 'in_out' to true for what is to be generated")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The variables that the call takes, each once."""
        return tuple({one.variable: None for one in self._placeholders.values() if not one.in_out})

    def request(self, step: Step, asked: str, begun: str) -> tuple[bytes, ChatRequest | CompletionRequest]:
        """The request for one output: `asked` is the text before the first, `begun` all between it and this one."""
        fields: dict[str, Any] = {**self._fields, **step.fields, "model": self.body.model, "stream": True}
        if not self.body.chat:
            fields["prompt"] = asked + begun
        else:
            fields["messages"] = [{"role": "user", "content": asked}]
        if self.body.chat and begun:
            fields["messages"].append({"role": "assistant", "content": begun})
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        body = msgspec.json.encode(fields)
        return body, parse_request(body, KINDS[self.path])

    def _steps(self) -> Iterator[Step]:
        """An output ends a step; later in the prompt its name stands for its value."""
        fill, start, generated = [], 0, set[str]()
        for match in PLACEHOLDER.finditer(self.body.prompt):
            placeholder = self._placeholders.get(match[1])
            if placeholder is None:
                continue  # braces that are nobody's business
            fill.append(self.body.prompt[start : match.start()])
            start = match.end()
            if not placeholder.in_out or placeholder.name in generated:
                fill.append(placeholder.variable)
                continue
            generated.add(placeholder.name)
            own = {name: value for name, value in (placeholder.params or {}).items() if name not in _NOT_FORWARDED}
            yield Step(tuple(fill), Output(placeholder.variable, placeholder.transform()), own)
            fill = []


def _at_fault(message: str) -> CallerError:
    return CallerError(f"'placeholders': {message}.", param="placeholders")
