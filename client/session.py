"""A session: the variables and calls of one run of a program, from its opening to the end of its `with` block."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from plait.client.connection import Connection
from plait.client.errors import AnswerError, ClientError, TemplateError
from plait.client.flow import Flow, Request, Retries, answered
from plait.client.prompt import Prompt
from plait.client.sent_request import SentRequest
from plait.client.transport import AsyncTransport, BlockingTransport
from plait.client.variable import Argument, SemanticVariable, texts_of

_NAME_CHARACTERS = 55  # a name has at most 64; the rest is for a unique suffix
_HAS_ENDED = (404, 410)  # it has expired, or an earlier request has deleted it


class Session:
    """The variables and calls of one run of a program. At its end the gateway cancels its unfinished calls.

    In a `with` block, each call of a semantic function sends one short request and raises the gateway's refusal. In an
    `async with` block, a call returns at once and its request is sent in the background. A refusal is then raised when
    a dependent variable is awaited, or else at the end of the block.

    Several threads may use a blocking session. The tasks of one event loop may use an asynchronous one.
    """

    def __init__(self, connection: Connection, session_id: str | None, ttl_s: float | None) -> None:
        self.id = session_id or uuid.uuid4().hex
        self._connection = connection
        self._ttl_s = ttl_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False
        self._sent: list[SentRequest] = []
        self._texts: dict[str, SemanticVariable] = {}
        self._texts_lock = threading.Lock()

    def variable(self, value: str | None = None, *, name: str | None = None) -> SemanticVariable:
        """A variable with a value. Without a value, it is the variable `name`, which another client sets.

        The gateway refuses (409) a value for a variable that already has one or that a call produces.
        """
        if value is None:
            if name is None:
                raise TypeError("give a value, or the name of a variable that another client sets")
            return SemanticVariable(self, name, None)
        chosen = name or _unique("text")
        sent = self._start(f"variable {chosen}", self._setting(chosen, value, is_ours=name is None), ())
        return SemanticVariable(self, chosen, sent, value)

    def submit(self, prompt: Prompt, arguments: Mapping[str, Argument]) -> tuple[SemanticVariable, ...]:
        """Submit a call; returns the variables of its outputs at once.

        Raises `TemplateError` for arguments that the prompt cannot take. A blocking session also raises `AnswerError`
        and `ConnectionFailedError`.
        """
        model = prompt.model or self._connection.model
        if model is None:
            raise TemplateError(f"{prompt.name} has no model; give it one, or give the Client a default")
        inputs = {name: self._variables(prompt, name, arguments[name]) for name in prompt.template.inputs}
        ids = {name: [variable.name for variable in given] for name, given in inputs.items()}
        outputs = [_unique(name) for name in prompt.template.outputs]
        body = prompt.body(self.id, model, ids, outputs)
        parents = [variable.sent_request for given in inputs.values() for variable in given]
        # This client made the outputs' names, so a producer that exists can only be an earlier try of this request.
        request = Request("POST", "/submit", body, done_code="double_producer")
        sent = self._start(prompt.name, answered(request, self.retries), parents)
        return tuple(SemanticVariable(self, name, sent) for name in outputs)

    @property
    def retries(self) -> Retries:
        """How requests are retried."""
        return self._connection.retries

    def blocking_transport(self) -> BlockingTransport:
        """The transport of a `get`. Raises `RuntimeError` in an asynchronous session: it would block the event loop."""
        if self._loop is not None:
            raise RuntimeError("this session was entered with `async with`: use `await variable.aget(...)` or astream")
        return self._connection.blocking

    def async_transport(self) -> AsyncTransport:
        """The transport of an `aget`, in either kind of session."""
        return self._connection.asynchronous

    def __enter__(self) -> Self:
        self._connection.blocking.run(self._opening())
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_open = False
        with suppress(*_hidden_by(error)):
            self._connection.blocking.run(self._closing())

    async def __aenter__(self) -> Self:
        await self._connection.asynchronous.run(self._opening())
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._is_open = False
        if error is not None:
            for sent in self._sent:
                sent.cancel()
        try:
            refusals = [await sent.end() for sent in self._sent]
        finally:
            with suppress(*_hidden_by(error)):
                await self._connection.asynchronous.run(self._closing())
        unmet = next((refusal for refusal in refusals if refusal is not None), None)
        if error is None and unmet is not None:
            raise unmet

    def _start(self, what: str, flow: Flow[bytes], parents: Sequence[SentRequest | None]) -> SentRequest | None:
        """Send a flow's requests: now in a blocking session, else in the background."""
        if not self._is_open:
            raise RuntimeError("the session is not open: use it in `with client.session() as session:`")
        if self._loop is None:
            self._connection.blocking.run(flow)
            return None
        if self._loop is not _running_loop():
            raise RuntimeError("this session belongs to the event loop in which it was entered")
        task = self._loop.create_task(self._send(flow))
        sent = SentRequest(what, task, [parent for parent in parents if parent is not None])
        self._sent.append(sent)
        return sent

    async def _send(self, flow: Flow[bytes]) -> None:
        await self._connection.asynchronous.run(flow)

    def _variables(self, prompt: Prompt, name: str, given: Argument) -> list[SemanticVariable]:
        """The variables of an input. Equal texts become one variable, so that the gateway sees that calls share it."""
        texts = texts_of(given)
        if any(text.session is not self for text in texts if not isinstance(text, str)):
            raise TemplateError(f"{prompt.name}: {name} is a variable of another session; get it, and pass its text")
        return [self._text(text) if isinstance(text, str) else text for text in texts]

    def _text(self, text: str) -> SemanticVariable:
        with self._texts_lock:
            variable = self._texts.get(text)
            if variable is None:
                variable = self._texts[text] = self.variable(text)
            return variable

    def _setting(self, name: str, value: str, *, is_ours: bool) -> Flow[bytes]:
        body = {"session_id": self.id, "semantic_var_id": name, "value": value}
        # If this client made the name, a 409 means what it means in `submit`. Otherwise others may have caused it.
        request = Request("POST", "/variables", body, repeatable=is_ours, done_code="double_producer")
        return answered(request, self.retries)

    def _opening(self) -> Flow[bytes]:
        ttl = {} if self._ttl_s is None else {"ttl_s": self._ttl_s}
        return answered(Request("POST", "/sessions", {"session_id": self.id, **ttl}), self.retries)

    def _closing(self) -> Flow[None]:
        try:
            yield from answered(Request("DELETE", f"/sessions/{self.id}"), self.retries)
        except AnswerError as error:
            if error.status not in _HAS_ENDED:
                raise

    def __repr__(self) -> str:
        return f"<Session {self.id}{' open' if self._is_open else ''}>"


def _unique(name: str) -> str:
    """A unique variable name that begins with `name`."""
    return f"{name[:_NAME_CHARACTERS]}_{uuid.uuid4().hex[:8]}"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _hidden_by(error: BaseException | None) -> tuple[type[ClientError], ...]:
    """The errors to suppress at closing: all client errors if the block failed with `error`, which says more."""
    return () if error is None else (ClientError,)
