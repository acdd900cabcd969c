"""A session: the variables and calls of one run of a program, from its opening to the end of its `with` block."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from plait.client.collected import Collected, unique
from plait.client.connection import Connection
from plait.client.delivery import Delivery
from plait.client.errors import AnswerError, ClientError, TemplateError
from plait.client.flow import Flow, Request, answered
from plait.client.gets import Awaited, JoinedGets, StreamedValue
from plait.client.native import Native
from plait.client.native_steps import NativeSteps
from plait.client.objectives import Wanted, criteria
from plait.client.prompt import Prompt
from plait.client.transport import BlockingTransport
from plait.client.variable import DEFAULT_TIMEOUT_S, RUNNING, Argument, Condition, SemanticVariable, own_texts

_HAS_ENDED = (404, 410)  # nothing was sent, it has expired, or an earlier request has deleted it


class Session:
    """The variables and calls of one run of a program. At the session's end the gateway cancels unfinished calls.

    A session collects values, calls and native steps without sending them. The first `get` (or `aget`, `str`, `stream`,
    `run`) sends all of them as one program, in its own request, and raises the gateway's refusal. Later gets send the
    new ones.

    Several threads may use a blocking session, and the tasks of one event loop an asynchronous one.
    """

    def __init__(
        self, connection: Connection, session_id: str | None, ttl_s: float | None, *, is_brief: bool = False
    ) -> None:
        self.id = session_id or uuid.uuid4().hex
        self._connection = connection
        self._collected = Collected()
        ttl = {} if ttl_s is None else {"ttl_s": ttl_s}
        self._delivery = Delivery({"session": self.id, **ttl}, self._collected, connection.retries)
        self._natives = NativeSteps(connection.natives, self._delivery)
        self._gets = JoinedGets(connection.asynchronous, self._delivery)
        self._is_brief = is_brief
        self._is_open = False
        self._is_async = False

    def variable(self, value: str | None = None, *, name: str | None = None) -> SemanticVariable:
        """A variable with a value. Without a value, it is the variable `name`, which another client sets.

        The gateway refuses (409) another value for a variable that has one, and a value for one that a call produces.
        """
        if value is None:
            if name is None:
                raise TypeError("give a value, or the name of a variable that another client sets")
            self._collected.expect(name)
            return SemanticVariable(self, name)
        self._check_open()
        chosen = name or unique("text")
        self._collected.set_value(chosen, value)
        return SemanticVariable(self, chosen, value)

    def submit(
        self, prompt: Prompt, arguments: Mapping[str, Argument], when: Condition | None = None
    ) -> tuple[SemanticVariable, ...]:
        """Collect a call, which runs if the condition `when` holds; returns the variables of its outputs.

        Raises `TemplateError` for arguments that the prompt cannot take.
        """
        self._check_open()
        model = prompt.model or self._connection.model
        if model is None:
            raise TemplateError(f"{prompt.name} has no model; give it one, or give the Client a default")
        texts = {name: own_texts(self, arguments[name], f"{prompt.name}: {name}") for name in prompt.template.inputs}
        inputs = {name: self._collected.names(given) for name, given in texts.items()}
        outputs = [unique(name) for name in prompt.template.outputs]
        taken = [name for names in inputs.values() for name in names]
        body = prompt.body(model, inputs, outputs)
        if when is not None:
            taken.append(when.variable.name)
            body["when"] = str(when)
        self._collected.call(prompt.name, body, taken, outputs)
        return tuple(SemanticVariable(self, name) for name in outputs)

    def compute(self, native: Native, arguments: Mapping[str, Argument]) -> SemanticVariable:
        """Collect a native step; returns the variable of its result. Raises `TemplateError` for wrong arguments."""
        self._check_open()
        return SemanticVariable(self, self._natives.add(self, native, arguments))

    def run(
        self, *variables: SemanticVariable, objective: Wanted = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[str, ...]:
        """Send all that was collected, and wait for the values of these variables. Without variables, only send.

        Raises the error of the first variable that has none, as `SemanticVariable.get` does, or the gateway's refusal.
        """
        transport = self._blocking_transport()
        awaited = Awaited(variables, objective, timeout_s)
        delivered = awaited.delivered(self._delivery)
        self._natives.start()
        return awaited.kept(transport.run(delivered))

    async def arun(
        self, *variables: SemanticVariable, objective: Wanted = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[str, ...]:
        """`run` in an event loop."""
        awaited = Awaited(variables, objective, timeout_s)
        delivered = awaited.delivered(self._delivery)
        self._natives.astart()
        return awaited.kept(await self._connection.asynchronous.run(delivered))

    async def aget(self, variable: SemanticVariable, objective: Wanted, timeout_s: float) -> str:
        """As `SemanticVariable.aget`."""
        self._collected.check(variable.name)
        self._natives.astart()
        return await self._gets.get(variable.name, criteria(objective), timeout_s)

    def stream(self, variable: SemanticVariable, objective: Wanted, timeout_s: float) -> Iterator[str]:
        """As `SemanticVariable.stream`."""
        transport = self._blocking_transport()
        streamed = StreamedValue(variable, self._delivery, objective, timeout_s)
        self._natives.start()
        yield from streamed.pieces(transport)

    async def astream(self, variable: SemanticVariable, objective: Wanted, timeout_s: float) -> AsyncIterator[str]:
        """As `SemanticVariable.astream`."""
        streamed = StreamedValue(variable, self._delivery, objective, timeout_s)
        self._natives.astart()
        async for piece in streamed.apieces(self._connection.asynchronous):
            yield piece

    def __enter__(self) -> Self:
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._leave(error)
        self._natives.end()
        if self._is_brief:
            self._connection.endings.start(self._closing())
            return
        with suppress(*_hidden_by(error)):
            self._connection.blocking.run(self._closing())

    async def __aenter__(self) -> Self:
        self._is_open = self._is_async = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._leave(error)
        await self._natives.aend()
        if self._is_brief:
            self._connection.endings.astart(self._closing())
            return
        with suppress(*_hidden_by(error)):
            await self._connection.asynchronous.run(self._closing())

    @contextmanager
    def current(self) -> Iterator[None]:
        """In this block, functions whose arguments are all plain texts belong to this session."""
        token = RUNNING.set(self)
        try:
            yield
        finally:
            RUNNING.reset(token)

    def _closing(self) -> Flow[None]:
        try:
            yield from answered(Request("DELETE", f"/sessions/{self.id}"), self._connection.retries)
        except AnswerError as error:
            if error.status not in _HAS_ENDED:
                raise

    def _leave(self, error: BaseException | None) -> None:
        """Collect nothing more. Warn of calls that were never sent, as Python warns of coroutines never awaited."""
        self._is_open = False
        unsent = self._collected.unsent()
        if error is None and unsent:
            names = ", ".join(dict.fromkeys(unsent))
            warnings.warn(
                f"the session ends, and {len(unsent)} of its calls were never sent, since nobody asked for a value "
                f"after them: {names}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("the session is not open: use it in `with client.session() as session:`")

    def _blocking_transport(self) -> BlockingTransport:
        """Raises `RuntimeError` in an asynchronous session, whose event loop it would block."""
        if self._is_async:
            raise RuntimeError(
                "this session was entered with `async with`: use `await variable.aget(...)`, astream or arun"
            )
        return self._connection.blocking

    def __repr__(self) -> str:
        return f"<Session {self.id}{' open' if self._is_open else ''}>"


def _hidden_by(error: BaseException | None) -> tuple[type[ClientError], ...]:
    """The errors to suppress at closing: all client errors if the block failed with `error`, which says more."""
    return () if error is None else (ClientError,)
