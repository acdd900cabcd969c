"""A semantic variable: a named text of a session that exists already or that a call will produce."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import msgspec

from plait.client.errors import TemplateError
from plait.client.native import Native
from plait.client.objectives import Wanted
from plait.client.prompt import Prompt

DEFAULT_TIMEOUT_S = 600.0

Read = Callable[[str], Any]
"""Turns a variable's text into another value."""


class Scope(Protocol):
    """The part of a session that its variables and functions use."""

    def submit(
        self, prompt: Prompt, arguments: Mapping[str, Argument], when: Condition | None = None
    ) -> tuple[SemanticVariable, ...]:
        """Collect a call; returns the variables of its outputs at once."""

    def compute(self, native: Native, arguments: Mapping[str, Argument]) -> SemanticVariable:
        """Collect a native step; returns the variable of its result at once."""

    def run(self, *variables: SemanticVariable, objective: Wanted, timeout_s: float) -> tuple[str, ...]:
        """Send what was collected, and get these variables in the same request."""

    async def aget(self, variable: SemanticVariable, objective: Wanted, timeout_s: float) -> str:
        """Get a variable in an event loop."""

    def stream(self, variable: SemanticVariable, objective: Wanted, timeout_s: float) -> Iterator[str]:
        """Get a variable in pieces."""

    def astream(self, variable: SemanticVariable, objective: Wanted, timeout_s: float) -> AsyncIterator[str]:
        """Get a variable in pieces in an event loop."""


RUNNING: ContextVar[Scope | None] = ContextVar("plait_session", default=None)
"""The session of the function that `Client.run` calls."""


class SemanticVariable:
    """A future of a text, which can be an argument of further semantic functions before it has a value.

    `name` is the variable's id in its `session`; other clients can use the id in header annotations. A value never
    changes. Once got, the value is kept here, even after the session's end.

    The methods that wait first send all that the session has collected. They raise `AnswerError` if the gateway refuses
    the program, `GetTimeoutError` after `timeout_s`, `VariableFailedError` with the chain of causes, and
    `ConnectionFailedError`.
    """

    __slots__ = ("_session", "_value", "name")

    def __init__(self, session: Scope, name: str, value: str | None = None) -> None:
        self.name = name
        self._session = session
        self._value = value

    @property
    def session(self) -> Scope:
        return self._session

    @property
    def value(self) -> str | None:
        """The value, if it was given or got before; None otherwise."""
        return self._value

    def keep(self, value: str) -> str:
        """Keep a value that was got; returns it."""
        self._value = value
        return value

    def get(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Wait at most `timeout_s` seconds for the value. The calls that produce it are scheduled for `objective`."""
        if self._value is None:
            self._session.run(self, objective=objective, timeout_s=timeout_s)
        return cast("str", self._value)

    async def aget(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """`get` in an event loop. The gets that tasks begin at the same time are one request."""
        if self._value is None:
            self._value = await self._session.aget(self, objective, timeout_s)
        return self._value

    def stream(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[str]:
        """The value in pieces, as they are generated; in one piece if the output has transforms.

        A stream that breaks off is not retried.
        """
        return iter((self._value,)) if self._value is not None else self._session.stream(self, objective, timeout_s)

    async def astream(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> AsyncIterator[str]:
        """`stream` in an event loop."""
        if self._value is not None:
            yield self._value
            return
        async for piece in self._session.astream(self, objective, timeout_s):
            yield piece

    def equals(self, text: str) -> Condition:
        """The condition that the value is `text`. White space around the two does not count."""
        return Condition(self, "==", text)

    def differs(self, text: str) -> Condition:
        """The condition that the value is not `text`. White space around the two does not count."""
        return Condition(self, "!=", text)

    def contains(self, text: str) -> Condition:
        """The condition that the value has `text` in it. White space around the text does not count."""
        return Condition(self, "contains", text)

    def __str__(self) -> str:
        return self.get()

    def __format__(self, spec: str) -> str:
        """The value, only after a get: formatting it into a text hides from the gateway where the text comes from."""
        if self._value is None:
            raise TypeError(f"{self!r} has no text yet: call get() first, or make it an input of a semantic function")
        return format(self._value, spec)

    def __repr__(self) -> str:
        return f"<SemanticVariable {self.name}{'' if self._value is None else f' = {self._value[:40]!r}'}>"


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a variable's value with a text, for `SemanticFunction.when`. The gateway compares.

    Upper and lower case differ. Raises `TemplateError` if `text` is not a string, or is empty with `contains`.
    """

    variable: SemanticVariable
    operator: Literal["==", "!=", "contains"]
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TemplateError(f"a condition compares with {type(self.text).__name__}; expected a string")
        if self.operator == "contains" and not self.text.strip():
            raise TemplateError("each value contains an empty text; give the condition another text")

    def __bool__(self) -> bool:
        """Raises `TypeError`: the value is not known yet, and `if condition:` would always take the same branch."""
        raise TypeError(f"{self} is decided in the gateway: pass it to `when`, or compare {self.variable.name}.get()")

    def __str__(self) -> str:
        return f"{self.variable.name} {self.operator} {msgspec.json.encode(self.text).decode()}"


Text = SemanticVariable | str
"""An input: a variable, or the text itself."""
Argument = Text | Sequence[Text]
"""A parameter's argument: one text, or several that are inserted one after the other."""


def texts_of(given: Argument) -> tuple[Text, ...]:
    """The texts of an argument. Raises `TemplateError` if it is neither a text nor a sequence of texts."""
    texts: tuple[object, ...] = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for text in texts:
        if not isinstance(text, SemanticVariable | str):
            raise TemplateError(f"an argument is {type(text).__name__}; expected semantic variables or strings")
    return cast("tuple[Text, ...]", texts)


def own_texts(session: Scope, given: Argument, what: str) -> tuple[Text, ...]:
    """As `texts_of`. Also raises `TemplateError`, with `what` in it, for a variable of another session."""
    texts = texts_of(given)
    if any(text.session is not session for text in texts if not isinstance(text, str)):
        raise TemplateError(f"{what} is a variable of another session; get it, and pass its text")
    return texts
