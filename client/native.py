"""A Python function that a program runs between two calls, without its signature."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plait.client.errors import ClientError

Function = Callable[..., str | Awaitable[str]]


class Failure(NamedTuple):
    """Why a function has no result: a `message` that names the function, and the exception."""

    message: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Native:
    """A function of texts whose result is a text. `name` appears in error messages.

    `seconds` is the time that it takes, as far as the program knows.
    """

    name: str
    function: Function
    seconds: float | None = None

    def body(self, inputs: Sequence[str], output: str) -> dict[str, object]:
        """A native step in a program, from its variables."""
        seconds = {} if self.seconds is None else {"seconds": self.seconds}
        return {"output": output, "inputs": inputs, **seconds}

    def compute(self, given: Mapping[str, object]) -> str | Failure:
        """Call the function in this thread. A coroutine runs in an event loop of its own."""
        try:
            result = self.function(**given)
            return self._text(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
        except Exception as error:  # noqa: BLE001  # whatever the function raises is why it has no result
            return self._failure(error)

    async def acompute(self, given: Mapping[str, object]) -> str | Failure:
        """Call the function: a coroutine function in this event loop, any other in a thread."""
        if not inspect.iscoroutinefunction(self.function):
            return await asyncio.to_thread(self.compute, given)
        try:
            return self._text(await self.function(**given))
        except Exception as error:  # noqa: BLE001  # as above
            return self._failure(error)

    def _text(self, result: object) -> str | Failure:
        if isinstance(result, str):
            result.encode()  # raises for half a surrogate pair, which no request can carry
            return result
        message = f"{self.name} returned {type(result).__name__}; a native function returns a str"
        return Failure(message, ClientError(message))

    def _failure(self, error: Exception) -> Failure:
        said = str(error)
        return Failure(f"{self.name} raised {type(error).__name__}{f': {said}' if said else ''}", error)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
