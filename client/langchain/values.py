"""A step that waits for values: at the end of a program, and before steps that decide by values."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from plait.client.errors import ClientError
from plait.client.langchain.call import awaited_in, session_in
from plait.client.results import variables_in, with_values

_FAILURES = (ClientError, OutputParserException)


class Values(Runnable[Any, Any]):
    """Sends what was collected, and returns its input with values in the place of variables."""

    def invoke(
        self,
        input: Any,  # noqa: A002  # the name is the interface's
        config: RunnableConfig | None = None,
        **_kwargs: Any,
    ) -> Any:
        """Wait for the values, if there are variables."""
        variables = list(variables_in(input))
        if variables:
            session_in(config, "a step that waits").run(*variables, **awaited_in(config))
        return with_values(input)

    async def ainvoke(
        self,
        input: Any,  # noqa: A002  # the name is the interface's
        config: RunnableConfig | None = None,
        **_kwargs: Any,
    ) -> Any:
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
        """The values, or why there are none. Values that came before are not got again."""
        try:
            return self.invoke(given, config)
        except _FAILURES as error:
            return error
