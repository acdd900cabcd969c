"""LangChain's prompt templates as ours: which pieces are text for ever, and which are variables."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import (
    BasePromptTemplate,
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
    SystemMessagePromptTemplate,
)

from gateway.client.errors import TemplateError
from gateway.client.template import Place, Template

Pieces = list[str | Place]


@dataclass(frozen=True, slots=True)
class ReadTemplate:
    """A template that ends in its output, and the functions that LangChain calls for some of its inputs."""

    template: Template
    late: Mapping[str, Callable[[], Any]]


def read_template(prompt: BasePromptTemplate[Any], *, merge_system: bool) -> ReadTemplate:
    """Raises `TemplateError` for a template whose variables cannot be told from its text, or that one user message
    cannot hold; `merge_system` allows system messages, whose text is put before the user's.
    """
    partial = prompt.partial_variables
    pieces = _pieces(prompt, merge_system=merge_system)
    fixed = [_filled(piece, partial) for piece in pieces]
    late = {name: value for name, value in partial.items() if callable(value)}
    inputs = {piece.name for piece in fixed if isinstance(piece, Place)}
    output = "answer"
    while output in inputs:
        output += "_"
    return ReadTemplate(Template((*fixed, Place(output, is_output=True))), late)


def _filled(piece: str | Place, partial: Mapping[str, Any]) -> str | Place:
    """Partial variables are constant text, which is what calls can share, unless a function makes them."""
    if isinstance(piece, str) or piece.name not in partial or callable(partial[piece.name]):
        return piece
    return str(partial[piece.name])


def _pieces(prompt: BasePromptTemplate[Any], *, merge_system: bool) -> Pieces:
    if isinstance(prompt, PromptTemplate):
        return list(_fields(prompt))
    if type(prompt) is not ChatPromptTemplate:
        raise TemplateError(f"{type(prompt).__name__} chooses its text at run time; use a PromptTemplate")
    pieces: Pieces = []
    for index, message in enumerate(prompt.messages):
        is_system = isinstance(message, SystemMessagePromptTemplate | SystemMessage)
        if is_system and not merge_system:
            raise TemplateError("a submission is one user message; merge_system=True puts the system's text before it")
        if not is_system and index < len(prompt.messages) - 1:
            raise TemplateError("a submission is one user message: nothing can come behind the user's")
        pieces += [*(["\n\n"] if pieces else []), *_message(message)]
    return pieces


def _message(message: object) -> Pieces:
    if isinstance(message, SystemMessagePromptTemplate | HumanMessagePromptTemplate):
        if isinstance(message.prompt, PromptTemplate):
            return list(_fields(message.prompt))
        raise TemplateError("a message with parts other than text cannot be a template")
    if isinstance(message, HumanMessage | SystemMessage) and isinstance(message.content, str):
        return [message.content]
    name = message.type if isinstance(message, BaseMessage) else type(message).__name__
    raise TemplateError(f"{name} cannot be part of a submission, which is one user message of text")


def _fields(prompt: PromptTemplate) -> Iterator[str | Place]:
    if prompt.template_format != "f-string":
        raise TemplateError(f"a template in {prompt.template_format}; only f-string templates can be read")
    for text, field, spec, conversion in string.Formatter().parse(prompt.template):
        if text:
            yield text
        if field is None:
            continue
        if spec or conversion or not field.isidentifier():
            raise TemplateError(f"{{{field}}} is formatted; a variable can only stand as it is")
        yield _filled(Place(field), prompt.partial_variables)
