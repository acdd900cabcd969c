"""Messages that a chain is given at run time: those of a `MessagesPlaceholder`, such as the history of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, convert_to_messages

from plait.client.errors import TemplateError
from plait.client.results import ParsedVariable
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
    """The roles and texts of messages in any form that LangChain takes. A call's result is a message of the AI."""
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
