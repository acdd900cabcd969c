"""Turns LangChain's prompt templates into Plait's: constant texts and variables.

A `MessagesPlaceholder`, such as the history of a chat, gets its messages at run time.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, convert_to_messages
from langchain_core.prompts import (
    AIMessagePromptTemplate,
    BasePromptTemplate,
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
    SystemMessagePromptTemplate,
)

from plait.client.errors import TemplateError
from plait.client.results import ParsedVariable
from plait.client.template import Piece, Place, Role, Template
from plait.client.variable import SemanticVariable, Text

_ROLES: Mapping[type, str] = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant"}


def role_and_text(message: BaseMessage) -> tuple[str, str]:
    """The role and the text of a message. Raises `TemplateError` if it is more than a text."""
    role = _ROLES.get(type(message))
    if role is None:
        raise TemplateError(f"{message.type} cannot be submitted; use messages of the system, the user and the AI")
    if not isinstance(message.content, str) or getattr(message, "tool_calls", None):
        raise TemplateError("a message must be one text, without other parts and tool calls")
    return role, message.content


def given_messages(given: Any) -> Iterator[tuple[str, Text]]:
    """The roles and texts of messages in any form that LangChain takes. A call's result is an AI message."""
    for message in given if isinstance(given, list | tuple) and not _is_pair(given) else [given]:
        if isinstance(message, ParsedVariable) and message.parser is None:
            yield "assistant", message.variable
        elif isinstance(message, SemanticVariable):
            yield "user", message
        elif isinstance(message, ParsedVariable):
            raise TemplateError(f"the result of {message.parser} is not a message")
        else:
            for converted in convert_to_messages([message]):
                yield role_and_text(converted)


def _is_pair(given: Any) -> bool:
    """Whether this is one message, as in `("human", "Hello")`."""
    return isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, str) for part in given)


_TEMPLATE_ROLES: Mapping[type, str] = {
    SystemMessagePromptTemplate: "system",
    HumanMessagePromptTemplate: "user",
    AIMessagePromptTemplate: "assistant",
}
_BRACES = re.compile(r"\{\{(?=\s*[A-Za-z_]\w*\s*\}\})")


@dataclass(frozen=True, slots=True)
class Messages:
    """The position of messages that are given at run time. Only the last `most` are used."""

    name: str
    is_optional: bool
    most: int | None

    def of(self, values: Mapping[str, Any]) -> list[tuple[str, Text]]:
        return list(given_messages(values.get(self.name, ())))[-(self.most or 0) :]


@dataclass(frozen=True, slots=True)
class ReadTemplate:
    """A template that ends with its output. `late` maps some inputs to the functions that make them at each call."""

    pieces: tuple[Piece | Messages, ...]
    late: Mapping[str, Callable[[], Any]]

    @property
    def names(self) -> tuple[str, ...]:
        places = (piece for piece in self.pieces if isinstance(piece, Place) and not piece.is_output)
        given = [place.name for place in places if place.name not in self.late]
        asked = [piece.name for piece in self.pieces if isinstance(piece, Messages) and not piece.is_optional]
        return tuple(dict.fromkeys([*given, *asked]))

    @property
    def template(self) -> Template:
        """The template, without the messages that are given at run time."""
        return Template(tuple(piece for piece in self.pieces if not isinstance(piece, Messages)))

    def filled(self, values: Mapping[str, Any]) -> tuple[Template, dict[str, Any]]:
        arguments = {name: make() for name, make in self.late.items()}
        pieces: list[Piece] = []
        taken = {piece.name for piece in self.pieces if isinstance(piece, Place)}
        for piece in self.pieces:
            if not isinstance(piece, Messages):
                pieces.append(piece)
                continue
            for number, (role, text) in enumerate(piece.of(values), 1):
                name = _free(f"{piece.name}_{number}", taken)
                taken.add(name)
                arguments[name] = text
                pieces += [Role(role), Place(name)]
        template = Template(tuple(pieces))
        return template, {name: arguments[name] if name in arguments else values[name] for name in template.inputs}


def read_template(prompt: BasePromptTemplate[Any], *, chat: bool) -> ReadTemplate:
    """Read a template. Raises `TemplateError` if its variables cannot be separated from its text, or if it has messages
    and the model is not a `chat` model.
    """
    partial = prompt.partial_variables
    fixed = [_filled(piece, partial) for piece in _pieces(prompt, chat=chat)]
    late: dict[str, Callable[[], Any]] = {name: value for name, value in partial.items() if callable(value)}
    taken = {piece.name for piece in fixed if isinstance(piece, Place | Messages)}
    braces = _free("braces", taken)
    pieces = list(_without_braces(fixed, braces))
    if Place(braces) in pieces:
        late[braces] = lambda: "{{"
        taken.add(braces)
    return ReadTemplate((*pieces, Place(_free("answer", taken), is_output=True)), late)


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _without_braces(pieces: Iterable[Piece | Messages], braces: str) -> Iterator[Piece | Messages]:
    """The pieces. Where a constant text has `{{name}}`, its opening braces become the input `braces`."""
    constant = ""
    for piece in (*pieces, Role("")):
        if isinstance(piece, str):
            constant += piece
            continue
        for number, part in enumerate(_BRACES.split(constant)):
            yield from (Place(braces),) if number else ()
            yield from (part,) if part else ()
        constant = ""
        yield from () if piece == Role("") else (piece,)


def _filled(piece: Piece | Messages, partial: Mapping[str, Any]) -> Piece | Messages:
    """The piece; a partial variable becomes constant text, which calls can share, unless a function produces it."""
    if not isinstance(piece, Place) or piece.name not in partial or callable(partial[piece.name]):
        return piece
    return str(partial[piece.name])


def _pieces(prompt: BasePromptTemplate[Any], *, chat: bool) -> list[Piece | Messages]:
    """The pieces before the answer, which is the assistant's message in a chat."""
    if isinstance(prompt, PromptTemplate):
        return list(_fields(prompt))
    if type(prompt) is not ChatPromptTemplate:
        name = type(prompt).__name__
        raise TemplateError(f"{name} chooses its text at run time; use a PromptTemplate or a ChatPromptTemplate")
    if not chat:
        raise TemplateError("a completion model continues a text; use a PromptTemplate instead of messages")
    pieces: list[Piece | Messages] = []
    for message in prompt.messages:
        pieces += _message(message)
    return [*pieces, Role("assistant")]


def _message(message: object) -> list[Piece | Messages]:
    if isinstance(message, BaseMessage):
        role, text = role_and_text(message)
        return [Role(role), text]
    if isinstance(message, MessagesPlaceholder):
        return [Messages(message.variable_name, message.optional, message.n_messages)]
    if type(message) not in _TEMPLATE_ROLES:
        name = type(message).__name__
        raise TemplateError(f"{name} cannot be submitted; use messages of the system, the user (human) and the AI")
    template = getattr(message, "prompt", None)
    if not isinstance(template, PromptTemplate):
        raise TemplateError("a message template must be one text, without other parts")
    return [Role(_TEMPLATE_ROLES[type(message)]), *_fields(template)]


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
        piece = _filled(Place(field), prompt.partial_variables)
        assert not isinstance(piece, Messages)
        yield piece
