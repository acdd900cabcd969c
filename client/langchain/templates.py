"""Turns LangChain's prompt templates into Plait's: constant texts and variables."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import (
    AIMessagePromptTemplate,
    BasePromptTemplate,
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
    SystemMessagePromptTemplate,
)

from plait.client.errors import TemplateError
from plait.client.template import Piece, Place, Role, Template

_ROLES: Mapping[type, str] = {
    SystemMessage: "system",
    SystemMessagePromptTemplate: "system",
    HumanMessage: "user",
    HumanMessagePromptTemplate: "user",
    AIMessage: "assistant",
    AIMessagePromptTemplate: "assistant",
}


@dataclass(frozen=True, slots=True)
class ReadTemplate:
    """A template that ends with its output. `late` maps some inputs to the functions that LangChain calls for them."""

    template: Template
    late: Mapping[str, Callable[[], Any]]


def read_template(prompt: BasePromptTemplate[Any], *, chat: bool) -> ReadTemplate:
    """Read a template. Raises `TemplateError` if its variables cannot be separated from its text, or if it has messages
    and the model is not a `chat` model.
    """
    partial = prompt.partial_variables
    fixed = [_filled(piece, partial) for piece in _pieces(prompt, chat=chat)]
    late = {name: value for name, value in partial.items() if callable(value)}
    inputs = {piece.name for piece in fixed if isinstance(piece, Place)}
    output = "answer"
    while output in inputs:
        output += "_"
    return ReadTemplate(Template((*fixed, Place(output, is_output=True))), late)


def _filled(piece: Piece, partial: Mapping[str, Any]) -> Piece:
    """The piece; a partial variable becomes constant text, which calls can share, unless a function produces it."""
    if not isinstance(piece, Place) or piece.name not in partial or callable(partial[piece.name]):
        return piece
    return str(partial[piece.name])


def _pieces(prompt: BasePromptTemplate[Any], *, chat: bool) -> list[Piece]:
    """The pieces before the answer, which is the assistant's message in a chat."""
    if isinstance(prompt, PromptTemplate):
        return list(_fields(prompt))
    if type(prompt) is not ChatPromptTemplate:
        name = type(prompt).__name__
        raise TemplateError(f"{name} chooses its text at run time; use a PromptTemplate or a ChatPromptTemplate")
    if not chat:
        raise TemplateError("a completion model continues a text; use a PromptTemplate instead of messages")
    pieces: list[Piece] = []
    for message in prompt.messages:
        pieces += _message(message)
    return [*pieces, Role("assistant")]


def _message(message: object) -> list[Piece]:
    role = _ROLES.get(type(message))
    if role is None:
        name = message.type if isinstance(message, BaseMessage) else type(message).__name__
        raise TemplateError(f"{name} cannot be submitted; use messages of the system, the user (human) and the AI")
    if isinstance(message, BaseMessage):
        if not isinstance(message.content, str) or getattr(message, "tool_calls", None):
            raise TemplateError("a message must be one text, without other parts and tool calls")
        return [Role(role), message.content]
    template = getattr(message, "prompt", None)
    if not isinstance(template, PromptTemplate):
        raise TemplateError("a message template must be one text, without other parts")
    return [Role(role), *_fields(template)]


def _fields(prompt: PromptTemplate) -> Iterator[Piece]:
    if prompt.template_format != "f-string":
        raise TemplateError(f"the template's format is {prompt.template_format}; use f-string")
    for text, field, spec, conversion in string.Formatter().parse(prompt.template):
        if text:
            yield text
        if field is None:
            continue
        if spec or conversion or not field.isidentifier():
            raise TemplateError(f"{{{field}}} has a format, an attribute or an index; use only a name in the braces")
        yield _filled(Place(field), prompt.partial_variables)
