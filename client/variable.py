"""A semantic variable: a named text of a session that exists already or that a call will produce."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, Protocol, cast

from plait.client.errors import TemplateError
from plait.client.flow import Request, Retries, got
from plait.client.objectives import Objective, Slo
from plait.client.prompt import Prompt, criteria
from plait.client.sent_request import SentRequest
from plait.client.transport import AsyncTransport, BlockingTransport
from plait.client.value_stream import ValueStream

DEFAULT_TIMEOUT_S = 600.0

Wanted = Objective | str | Slo | None
"""The objective of a `get`: `latency`, `throughput`, an `Slo` (in seconds), or None."""


class Scope(Protocol):
    """The part of a session that its variables use."""

    id: str

    @property
    def retries(self) -> Retries:
        """How requests are retried."""

    def blocking_transport(self) -> BlockingTransport:
        """The transport of a `get`. Raises `RuntimeError` in an asynchronous session."""

    def async_transport(self) -> AsyncTransport:
        """The transport of an `aget`."""

    def submit(self, prompt: Prompt, arguments: Mapping[str, Argument]) -> tuple[SemanticVariable, ...]:
        """Submit a call; returns the variables of its outputs at once."""


class SemanticVariable:
    """A future of a text. It can be an argument of further semantic functions before it has a value.

    `name` is the variable's id in its `session`. Other clients can use it in header annotations. A value never changes.
    Once got, the value is kept here, even after the session's end.

    The methods that wait raise `GetTimeoutError` after `timeout_s`, `VariableFailedError` with the chain of causes,
    `ConnectionFailedError`, and `AnswerError` for any other refusal, such as an unknown session.
    """

    __slots__ = ("_sent_request", "_session", "_value", "name")

    def __init__(self, session: Scope, name: str, sent_request: SentRequest | None, value: str | None = None) -> None:
        self.name = name
        self._session = session
        self._sent_request = sent_request
        self._value = value

    @property
    def session(self) -> Scope:
        """The session of the variable."""
        return self._session

    @property
    def sent_request(self) -> SentRequest | None:
        """The request that creates the variable, if it was sent in the background."""
        return self._sent_request

    def get(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Wait at most `timeout_s` seconds for the value. The calls that produce it are scheduled for `objective`."""
        if self._value is None:
            transport = self._session.blocking_transport()
            request = self._request(objective)
            self._value = transport.run(got(request, self.name, timeout_s, self._session.retries))
        return self._value

    async def aget(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """`get` in an event loop."""
        if self._value is None:
            await self._accepted()
            request = self._request(objective)
            flow = got(request, self.name, timeout_s, self._session.retries)
            self._value = await self._session.async_transport().run(flow)
        return self._value

    def stream(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[str]:
        """The value in pieces, as they are generated; in one piece if the output has transforms.

        A stream that breaks off is not retried.
        """
        if self._value is not None:
            yield self._value
            return
        stream = ValueStream(self.name, timeout_s)
        with self._session.blocking_transport().lines(self._request(objective, timeout_s)) as lines:
            for line in lines:
                if piece := stream.feed(line):
                    yield piece
        self._value = stream.close()

    async def astream(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> AsyncIterator[str]:
        """`stream` in an event loop."""
        if self._value is not None:
            yield self._value
            return
        await self._accepted()
        stream = ValueStream(self.name, timeout_s)
        async with self._session.async_transport().lines(self._request(objective, timeout_s)) as lines:
            async for line in lines:
                if piece := stream.feed(line):
                    yield piece
        self._value = stream.close()

    async def _accepted(self) -> None:
        """Raise if the gateway refused the variable's request, or a request that it depends on."""
        if self._sent_request is not None:
            await self._sent_request.accepted(self.name)

    def _request(self, objective: Wanted, streamed_for_s: float | None = None) -> Request:
        """The request of a `get`. `streamed_for_s` is the time-out of a stream; `got` adds that of a plain `get`."""
        body = {
            "session_id": self._session.id,
            "semantic_var_id": self.name,
            "criteria": criteria(objective),
        }
        if streamed_for_s is None:
            return Request("POST", "/get", body)
        return Request("POST", "/get", {**body, "timeout_s": streamed_for_s, "stream": True}, wait_s=streamed_for_s)

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError(f"{self!r} has no text yet: call get() first, or make it an input of a semantic function")

    def __repr__(self) -> str:
        return f"<SemanticVariable {self.name}{'' if self._value is None else f' = {self._value[:40]!r}'}>"


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
