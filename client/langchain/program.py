"""Runs a chain as a program in the gateway: submits all its calls at once, then gets the results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig

from plait.client.client import Client
from plait.client.langchain.call import ParsedVariable, in_session
from plait.client.langchain.chain import Chain, semantic
from plait.client.variable import DEFAULT_TIMEOUT_S, SemanticVariable, Wanted

_THREADS = 32


class Program(Runnable[Any, Any]):
    """A chain that runs in the gateway. It is invoked like the chain and has the same result.

    Each invocation is a session. `objective` and `timeout_s` are those of each result's `get`.
    """

    def __init__(
        self,
        chain: Chain,
        client: Client,
        *,
        objective: Wanted = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._chain = semantic(chain)
        self._client = client
        self._wanted: dict[str, Any] = {"objective": objective, "timeout_s": timeout_s}

    def invoke(
        self,
        input: Any,  # noqa: A002  # the name is the interface's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Submit the calls and wait for the result."""
        with self._client.session() as session:
            result = self._chain.invoke(input, in_session(session, config), **kwargs)
            return self._values(result)

    async def ainvoke(
        self,
        input: Any,  # noqa: A002  # the name is the interface's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """`invoke` in an event loop."""
        async with self._client.session() as session:
            result = await self._chain.ainvoke(input, in_session(session, config), **kwargs)
            return await self._avalues(result)

    def stream(
        self,
        input: Any,  # noqa: A002  # the name is the interface's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """The text in pieces, if the chain ends in a text; otherwise the whole result in one piece."""
        with self._client.session() as session:
            result = self._chain.invoke(input, in_session(session, config), **kwargs)
            if isinstance(result, SemanticVariable):
                yield from result.stream(**self._wanted)
            else:
                yield self._values(result)

    async def astream(
        self,
        input: Any,  # noqa: A002  # the name is the interface's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """`stream` in an event loop."""
        async with self._client.session() as session:
            result = await self._chain.ainvoke(input, in_session(session, config), **kwargs)
            if isinstance(result, SemanticVariable):
                async for piece in result.astream(**self._wanted):
                    yield piece
            else:
                yield await self._avalues(result)

    def _values(self, result: Any) -> Any:
        """Get all values at the same time, so that the gateway knows all objectives before the first value comes."""
        variables = list(_variables(result))
        if len(variables) > 1:
            with ThreadPoolExecutor(min(len(variables), _THREADS)) as pool:
                list(pool.map(lambda variable: variable.get(**self._wanted), variables))
        return _replaced(result, lambda found: found.get(**self._wanted))

    async def _avalues(self, result: Any) -> Any:
        await asyncio.gather(*(variable.aget(**self._wanted) for variable in _variables(result)))
        return _replaced(result, lambda found: found.get())  # the variables have their values now


def _variables(result: Any) -> Iterator[SemanticVariable]:
    """The variables in a result, at any depth of dictionaries and lists."""
    if isinstance(result, SemanticVariable | ParsedVariable):
        yield result if isinstance(result, SemanticVariable) else result.variable
    elif isinstance(result, dict | list | tuple):
        for part in result.values() if isinstance(result, dict) else result:
            yield from _variables(part)


def _replaced(result: Any, value: Callable[[SemanticVariable | ParsedVariable], Any]) -> Any:
    """The result with each variable's value in its place."""
    if isinstance(result, SemanticVariable | ParsedVariable):
        return value(result)
    if isinstance(result, dict):
        return {key: _replaced(part, value) for key, part in result.items()}
    return [_replaced(part, value) for part in result] if isinstance(result, list | tuple) else result
