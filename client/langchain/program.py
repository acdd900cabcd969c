"""Runs a chain as a program in the gateway: its calls and the gets of its results are one request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from plait.client.client import Client
from plait.client.langchain.call import Values, in_session
from plait.client.langchain.chain import Chain, semantic
from plait.client.objectives import Wanted
from plait.client.session import Session
from plait.client.variable import DEFAULT_TIMEOUT_S, SemanticVariable

Configs = RunnableConfig | Sequence[RunnableConfig] | None


class Program(Runnable[Any, Any]):
    """A chain that runs in the gateway, invoked like the chain and with the same result.

    Each invocation, and each batch, is a session of its own, which is ended in the background. `objective` and
    `timeout_s` are those of the results.
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
        self._values = Values()
        self._client = client
        self._awaited: dict[str, Any] = {"objective": objective, "timeout_s": timeout_s}

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Send the calls and wait for the result."""
        with self._client.brief_session() as session:
            here = self._in(session, config)
            return self._values.invoke(self._chain.invoke(input, here, **kwargs), here)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """`invoke` in an event loop."""
        async with self._client.brief_session() as session:
            here = self._in(session, config)
            return await self._values.ainvoke(await self._chain.ainvoke(input, here, **kwargs), here)

    def batch(
        self, inputs: Sequence[Any], config: Configs = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """The results of several inputs, whose calls are one program."""
        with self._client.brief_session() as session:
            here = [self._in(session, one) for one in get_config_list(config, len(inputs))]
            chain = self._chain | self._values
            return chain.batch(list(inputs), here, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self, inputs: Sequence[Any], config: Configs = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """`batch` in an event loop."""
        async with self._client.brief_session() as session:
            here = [self._in(session, one) for one in get_config_list(config, len(inputs))]
            chain = self._chain | self._values
            return await chain.abatch(list(inputs), here, return_exceptions=return_exceptions, **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """The text in pieces, if the chain ends in a text; otherwise the whole result in one piece."""
        with self._client.brief_session() as session:
            here = self._in(session, config)
            result = self._chain.invoke(input, here, **kwargs)
            if isinstance(result, SemanticVariable):
                yield from result.stream(**self._awaited)
            else:
                yield self._values.invoke(result, here)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """`stream` in an event loop."""
        async with self._client.brief_session() as session:
            here = self._in(session, config)
            result = await self._chain.ainvoke(input, here, **kwargs)
            if isinstance(result, SemanticVariable):
                async for piece in result.astream(**self._awaited):
                    yield piece
            else:
                yield await self._values.ainvoke(result, here)

    def _in(self, session: Session, config: RunnableConfig | None) -> RunnableConfig:
        return in_session(session, config, **self._awaited)
