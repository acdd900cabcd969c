"""A semantic variable: a text that is there already or that a call will produce, under a name in a session."""

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
"""What a value is wanted for: `latency`, `throughput`, times of its own (an `Slo`, in seconds), or nothing said."""


class Scope(Protocol):
    """What a variable asks of its session."""

    id: str

    @property
    def retries(self) -> Retries:
        """How requests are repeated."""

    def blocking_transport(self) -> BlockingTransport:
        """For a `get`. Raises `RuntimeError` in an asynchronous session."""

    def async_transport(self) -> AsyncTransport:
        """For an `aget`."""

    def submit(self, prompt: Prompt, arguments: Mapping[str, Argument]) -> tuple[SemanticVariable, ...]:
        """Send a call on its way; returns the variables of its outputs at once."""


class SemanticVariable:
    """A future of a text. It can be an argument of further semantic functions at once, without waiting for it.

    `name` is the variable's id in its `session`, which header annotations of other clients can refer to. A value never
    changes: once it was got, it is kept here, also beyond the session's end.

    What the methods that wait can raise: `GetTimeoutError` after `timeout_s`, `VariableFailedError` with the chain of
    causes, `AnswerError` for any other refusal (an unknown session), `ConnectionFailedError`.
    """

    __slots__ = ("_sent_request", "_session", "_value", "name")

    def __init__(self, session: Scope, name: str, sent_request: SentRequest | None, value: str | None = None) -> None:
        self.name = name
        self._session = session
        self._sent_request = sent_request
        self._value = value

    @property
    def session(self) -> Scope:
        """Where it belongs."""
        return self._session

    @property
    def sent_request(self) -> SentRequest | None:
        """The request that announced it, where that was sent in the background."""
        return self._sent_request

    def get(self, objective: Wanted = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """The value, after up to `timeout_s` seconds; `objective` says what the calls behind it are optimised for."""
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
        """The value in pieces, as they are generated; in one piece if transforms make it of the whole completion.

        A stream that breaks off is not asked for again by itself.
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
        """Raises if the variable will never come because it, or what it needs, was refused at submission."""
        if self._sent_request is not None:
            await self._sent_request.accepted(self.name)

    def _request(self, objective: Wanted, streamed_for_s: float | None = None) -> Request:
        """A `get`: without a time, which is added for each wait, or streamed for so many seconds."""
        body = {
            "session_id": self._session.id,
            "semantic_var_id": self.name,
            "criteria": criteria(objective),
        }
        if streamed_for_s is None:
            return Request("POST", "/get", body)
        return Request("POST", "/get", {**body, "timeout_s": streamed_for_s, "stream": True}, wait_s=streamed_for_s)

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError(f"{self!r} has to be got before it can stand in a text; or make it a semantic function's input")

    def __repr__(self) -> str:
        return f"<SemanticVariable {self.name}{'' if self._value is None else f' = {self._value[:40]!r}'}>"


Text = SemanticVariable | str
"""What an input takes: a variable, or the text itself."""
Argument = Text | Sequence[Text]
"""What a parameter takes: a text, or several that are put in one after the other."""


def texts_of(given: Argument) -> tuple[Text, ...]:
    """What an argument consists of. Raises `TemplateError` for what is neither a text nor several."""
    texts: tuple[object, ...] = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for text in texts:
        if not isinstance(text, SemanticVariable | str):
            raise TemplateError(f"an argument is {type(text).__name__}; expected semantic variables or strings")
    return cast("tuple[Text, ...]", texts)
