"""The steps of a chain that has become a program: `SemanticCall` returns a variable, `Values` waits for values."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list, merge_configs

from plait.client.errors import ClientError, TemplateError
from plait.client.langchain.templates import ReadTemplate
from plait.client.objectives import Wanted
from plait.client.prompt import Prompt
from plait.client.results import ParsedVariable, variables_in, with_values
from plait.client.session import Session
from plait.client.variable import DEFAULT_TIMEOUT_S, Argument, Read, SemanticVariable, Text

_SESSION = "plait_session"
_AWAITED = "plait_awaited"


class SemanticCall(Runnable[Any, SemanticVariable | ParsedVariable]):
    """A step that takes the template's inputs, collects one call and does not wait for it.

    An input is a text, a variable, or a list of these; for a `MessagesPlaceholder` it is a list of messages. The
    session comes with the configuration: see `in_session`. `read` and `parser` are those of the returned
    `ParsedVariable`, if the value needs parsing.
    """

    def __init__(self, prompt: Prompt, template: ReadTemplate, read: Read | None, parser: str | None) -> None:
        self.prompt = prompt
        self.name = prompt.name
        self._template = template
        self._read = read
        self._parser = parser

    def invoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> SemanticVariable | ParsedVariable:
        if kwargs:
            raise TemplateError(f"{self.name} cannot be invoked with {', '.join(kwargs)}; bind it to the model instead")
        template, values = self._template.filled(self._values(input))
        arguments = {name: _argument(value) for name, value in values.items()}
        (variable,) = session_in(config, self.prompt.name).submit(replace(self.prompt, template=template), arguments)
        return variable if self._read is None else ParsedVariable(variable, self._read, self._parser)

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> SemanticVariable | ParsedVariable:
        return self.invoke(input, config, **kwargs)

    def _values(self, given: Any) -> Mapping[str, Any]:
        names = self._template.names
        values = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
        missing = [name for name in names if name not in values]
        if missing or (len(names) > 1 and values is not given):
            raise TemplateError(f"{self.name} needs {', '.join(names)}; missing: {', '.join(missing or names)}")
        return values


def in_session(
    session: Session,
    config: RunnableConfig | None = None,
    *,
    objective: Wanted = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> RunnableConfig:
    """`config` with the session added. A chain that is invoked with it collects its calls in the session.

    `objective` and `timeout_s` are for steps that have to wait for a value, such as a fallback.
    """
    awaited = {"objective": objective, "timeout_s": timeout_s}
    return merge_configs(config, {"configurable": {_SESSION: session, _AWAITED: awaited}})


def session_in(config: RunnableConfig | None, step: str) -> Session:
    """The session in a configuration. Raises `TemplateError` that names the step if there is none."""
    session = ensure_config(config).get("configurable", {}).get(_SESSION)
    if not isinstance(session, Session):
        raise TemplateError(
            f"{step} has no session: invoke with config=in_session(session), or run the chain as a Program"
        )
    return session


def awaited_in(config: RunnableConfig | None) -> dict[str, Any]:
    """The objective and the time-out of a step that waits."""
    return dict(ensure_config(config).get("configurable", {}).get(_AWAITED, {}))


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


_FAILURES = (ClientError, OutputParserException)


class Values(Runnable[Any, Any]):
    """Sends what was collected, and returns its input with values in the place of variables."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **_kwargs: Any) -> Any:
        """Wait for the values, if there are variables."""
        variables = list(variables_in(input))
        if variables:
            session_in(config, "a step that waits").run(*variables, **awaited_in(config))
        return with_values(input)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **_kwargs: Any) -> Any:
        """`invoke` in an event loop. Steps that wait at the same time send one request."""
        await asyncio.gather(*(variable.aget(**awaited_in(config)) for variable in variables_in(input)))
        return with_values(input)

    def batch(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **_kwargs: Any,
    ) -> list[Any]:
        """`invoke` for several inputs, with one request."""
        configs = get_config_list(config, len(inputs))
        try:
            return list(self.invoke(list(inputs), configs[0])) if inputs else []
        except _FAILURES:
            if not return_exceptions:
                raise
        return [self._outcome(given, one) for given, one in zip(inputs, configs, strict=True)]

    async def abatch(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **_kwargs: Any,
    ) -> list[Any]:
        """`batch` in an event loop."""
        configs = get_config_list(config, len(inputs))
        gets = (self.ainvoke(given, one) for given, one in zip(inputs, configs, strict=True))
        return list(await asyncio.gather(*gets, return_exceptions=return_exceptions))

    def _outcome(self, given: Any, config: RunnableConfig) -> Any:
        """The values, or the error if there are none. Values that were got before are not got again."""
        try:
            return self.invoke(given, config)
        except _FAILURES as error:
            return error
