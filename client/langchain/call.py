"""One step that replaces a prompt, a model and a parser of LangChain. It submits a call and returns a variable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, merge_configs

from plait.client.errors import TemplateError
from plait.client.langchain.parsers import Read
from plait.client.prompt import Prompt
from plait.client.session import Session
from plait.client.variable import DEFAULT_TIMEOUT_S, Argument, SemanticVariable, Text, Wanted

_SESSION = "plait_session"


@dataclass(frozen=True, slots=True)
class ParsedVariable:
    """A variable with a function `read` that turns its text into LangChain's result: a list, an object, a message.

    `parser` names the parser if the gateway has no transform for it. Then the result cannot be an input of a call.
    """

    variable: SemanticVariable
    read: Read
    parser: str | None = None

    def get(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """The parsed value. Waits like `SemanticVariable.get`, and also raises the parser's errors."""
        return self.read(self.variable.get(objective, timeout_s=timeout_s))

    async def aget(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """`get` in an event loop."""
        return self.read(await self.variable.aget(objective, timeout_s=timeout_s))


class SemanticCall(Runnable[Any, SemanticVariable | ParsedVariable]):
    """A step that submits one call and does not wait for it. It takes the template's inputs.

    An input is a text, a variable, or a list of these. The session comes with the configuration: see `in_session`.
    `late` maps some inputs to functions that produce them at each call. `read` and `parser` are those of the returned
    `ParsedVariable`, if the value needs parsing.
    """

    def __init__(
        self, prompt: Prompt, late: Mapping[str, Callable[[], Any]], read: Read | None, parser: str | None
    ) -> None:
        self.prompt = prompt
        self.name = prompt.name
        self._late = late
        self._read = read
        self._parser = parser

    def invoke(
        self,
        input: Any,  # noqa: A002  # the name is the interface's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> SemanticVariable | ParsedVariable:
        """Submit the call."""
        if kwargs:
            raise TemplateError(f"{self.name} cannot be invoked with {', '.join(kwargs)}; bind it to the model instead")
        session = ensure_config(config).get("configurable", {}).get(_SESSION)
        if not isinstance(session, Session):
            raise TemplateError("no session: invoke with config=in_session(session), or run the chain as a Program")
        (variable,) = session.submit(self.prompt, self._arguments(input))
        return variable if self._read is None else ParsedVariable(variable, self._read, self._parser)

    async def ainvoke(
        self,
        input: Any,  # noqa: A002  # the name is the interface's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> SemanticVariable | ParsedVariable:
        """Submit the call. An asynchronous session sends it in the background."""
        return self.invoke(input, config, **kwargs)

    def _arguments(self, given: Any) -> dict[str, Argument]:
        names = [name for name in self.prompt.template.inputs if name not in self._late]
        values = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
        missing = [name for name in names if name not in values]
        if missing or (len(names) > 1 and values is not given):
            raise TemplateError(f"{self.name} needs {', '.join(names)}; missing: {', '.join(missing or names)}")
        made = {name: make() for name, make in self._late.items()}
        return {name: _argument({**values, **made}[name]) for name in self.prompt.template.inputs}


def in_session(session: Session, config: RunnableConfig | None = None) -> RunnableConfig:
    """`config` with the session added. A chain that is invoked with it submits its calls to the session."""
    return merge_configs(config, {"configurable": {_SESSION: session}})


def _argument(value: Any) -> Argument:
    if isinstance(value, list | tuple):
        return [_text(item) for item in value]
    return _text(value)


def _text(value: Any) -> Text:
    """The text that LangChain would put into the template, or the variable that takes its place."""
    if isinstance(value, ParsedVariable):
        if value.parser is not None:
            raise TemplateError(
                f"{value.parser} has no transform in the gateway, so its result cannot go into another call; "
                "end the chain there, or use a parser that has one"
            )
        return value.variable
    if isinstance(value, SemanticVariable):
        return value
    return value.text if isinstance(value, BaseMessage) else str(value)
