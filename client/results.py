"""A program's result: variables, alone or in lists, tuples and dictionaries, to be replaced by their values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plait.client.objectives import Wanted
from plait.client.variable import DEFAULT_TIMEOUT_S, Read, SemanticVariable


@dataclass(frozen=True, slots=True)
class ParsedVariable:
    """A variable with a function `read` that turns its text into another value: a list, an object, a message.

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


def variables_in(result: Any) -> Iterator[SemanticVariable]:
    """The variables in a result, at any depth."""
    if isinstance(result, SemanticVariable | ParsedVariable):
        yield result if isinstance(result, SemanticVariable) else result.variable
    elif isinstance(result, dict | list | tuple):
        for part in result.values() if isinstance(result, dict) else result:
            yield from variables_in(part)


def with_values(result: Any) -> Any:
    """The result with each variable replaced by its value, which was got before."""
    if isinstance(result, SemanticVariable | ParsedVariable):
        return result.get()
    if isinstance(result, dict):
        return {key: with_values(part) for key, part in result.items()}
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        return tuple(with_values(part) for part in result)
    return [with_values(part) for part in result] if isinstance(result, list | tuple) else result
