"""Three ways to get variables: several at once (`Awaited`), one in pieces (`StreamedValue`), and the gets of concurrent
tasks joined into one request (`JoinedGets`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from plait.client.collected import Batch
from plait.client.delivery import Delivery, Result, raised
from plait.client.errors import AnswerError, ClientError, ConnectionFailedError, ErrorBody, ErrorObject
from plait.client.flow import MAY_PASS, Flow, Request, failed_get
from plait.client.objectives import Wanted, criteria
from plait.client.transport import AsyncTransport, BlockingTransport
from plait.client.variable import SemanticVariable


class News(NamedTuple):
    """An event of a stream about the variable `name`: a further `piece` of its text, its `value`, or its `error`."""

    name: str
    piece: str | None = None
    value: str | None = None
    error: ClientError | None = None


class _Data(msgspec.Struct, frozen=True):
    name: str | None = None
    delta: str | None = None
    value: str | None = None
    error: ErrorObject | None = None


class ProgramStream:
    """Reads the server-sent events of a streamed program, line by line. The stream waits for `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def feed(self, line: str) -> News | None:
        """The event that a line has, if any. Raises `AnswerError` if the stream as a whole has failed."""
        if not line.startswith("data:"):
            return None  # the event's kind, which its fields show too; a comment; the blank line after an event
        data = msgspec.json.decode(line.removeprefix("data:"), type=_Data)
        error = None if data.error is None else ErrorBody(data.error).exception()
        if data.name is None:
            if error is not None:
                raise error
            return None  # the end
        failure = None if error is None else failed_get(error, data.name, self._timeout_s)
        return News(data.name, data.delta, data.value, failure)


@dataclass(frozen=True, slots=True)
class Awaited:
    """Variables whose values a program waits for at once, in one request. Some may have their values already."""

    variables: tuple[SemanticVariable, ...]
    objective: Wanted
    timeout_s: float

    def delivered(self, delivery: Delivery) -> Flow[dict[str, Result]]:
        """Sends what was collected, and gets the values that are missing. Raises the error of a refused call."""
        waiting = [variable.name for variable in self.variables if variable.value is None]
        for name in waiting:
            delivery.collected.check(name)
        return delivery.delivered(dict.fromkeys(waiting, criteria(self.objective)), self.timeout_s)

    def kept(self, results: Mapping[str, Result]) -> tuple[str, ...]:
        """The values of all variables, which keep them. Raises the error of the first variable that has none."""
        for variable in self.variables:
            result = results.get(variable.name)
            if isinstance(result, str):
                variable.keep(result)
        return tuple(raised(results[one.name] if one.value is None else one.value) for one in self.variables)


class StreamedValue:
    """Sends what was collected together with a streamed get of one variable, which keeps its value."""

    def __init__(self, variable: SemanticVariable, delivery: Delivery, objective: Wanted, timeout_s: float) -> None:
        delivery.collected.check(variable.name)
        self._variable = variable
        self._delivery = delivery
        self._criteria = criteria(objective)
        self._timeout_s = timeout_s
        self._stream = ProgramStream(timeout_s)
        self._given = False
        self._error: ClientError | None = None

    def pieces(self, transport: BlockingTransport) -> Iterator[str]:
        """The pieces of the text. Raises the variable's error, or the gateway's refusal."""
        batch = transport.run(self._delivery.opened([self._variable.name]))
        with batch.sent(), transport.lines(self._request(batch)) as lines:
            batch.enter()
            for line in lines:
                if piece := self._piece(line):
                    yield piece
            batch.accept()
        self._close()

    async def apieces(self, transport: AsyncTransport) -> AsyncIterator[str]:
        """`pieces` in an event loop."""
        batch = await transport.run(self._delivery.opened([self._variable.name]))
        with batch.sent():
            async with transport.lines(self._request(batch)) as lines:
                batch.enter()
                async for line in lines:
                    if piece := self._piece(line):
                        yield piece
                batch.accept()
        self._close()

    def _request(self, batch: Batch) -> Request:
        return self._delivery.request(batch, {self._variable.name: self._criteria}, self._timeout_s, stream=True)

    def _piece(self, line: str) -> str:
        """The text in a line, empty for most lines."""
        news = self._stream.feed(line)
        if news is None:
            return ""
        if news.error is not None:
            # Raised at the end of the stream, so that its connection can be used again.
            self._error = self._delivery.explained(news.error)
        piece = news.piece or ""
        if news.value is not None:
            self._variable.keep(news.value)
            piece = "" if self._given else news.value  # no piece was streamed before the value
        self._given |= piece != ""
        return piece

    def _close(self) -> None:
        if self._error is not None:
            raise self._error
        if self._variable.value is None:
            raise ConnectionFailedError(f"the stream of {self._variable.name} ended before its value; get it again")


@dataclass(slots=True, eq=False)
class _Group:
    """Gets with the same time-out: each variable's criteria, and the futures that wait for it."""

    timeout_s: float
    criteria: dict[str, object] = field(default_factory=dict)
    waiting: dict[str, list[asyncio.Future[Result]]] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    def takes(self, name: str, criteria: object, timeout_s: float) -> bool:
        """Whether this get can join."""
        return timeout_s == self.timeout_s and self.criteria.get(name, criteria) == criteria

    def answer(self, name: str, result: Result) -> None:
        for future in self.waiting.pop(name, ()):
            if not future.done():
                future.set_result(result)

    def fail(self, error: ClientError) -> None:
        for name in list(self.waiting):
            self.answer(name, error)

    @property
    def open(self) -> Mapping[str, object]:
        """The criteria of the gets that a task still waits for."""
        wanted = {name for name, futures in self.waiting.items() if not all(future.done() for future in futures)}
        return {name: criteria for name, criteria in self.criteria.items() if name in wanted}


class JoinedGets:
    """Joins the gets that a session's tasks begin in one turn of the event loop into one request.

    The request also sends all that was collected. A request for several variables is streamed, so that each task gets
    its value as soon as the gateway has it.
    """

    def __init__(self, transport: AsyncTransport, delivery: Delivery) -> None:
        self._transport = transport
        self._delivery = delivery
        self._next: list[_Group] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, name: str, criteria: object, timeout_s: float) -> str:
        """The variable's value. Raises its error, or the gateway's refusal of the program."""
        loop = asyncio.get_running_loop()
        if not self._next:
            loop.call_soon(self._send, loop)
        group = next((group for group in self._next if group.takes(name, criteria, timeout_s)), None)
        if group is None:
            group = _Group(timeout_s)
            self._next.append(group)
        future: asyncio.Future[Result] = loop.create_future()
        group.criteria[name] = criteria
        group.waiting.setdefault(name, []).append(future)
        try:
            return raised(await future)
        except asyncio.CancelledError:
            if not group.open and group.task is not None:
                group.task.cancel()  # no other task waits for this request
            raise

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        groups, self._next = self._next, []
        for group in groups:
            if group.open:
                group.task = loop.create_task(self._ask(group))
                self._tasks.add(group.task)
                group.task.add_done_callback(partial(self._ended, group))

    def _ended(self, group: _Group, task: asyncio.Task[None]) -> None:
        """A request has ended: end the gets that still wait for it."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        for future in (future for futures in group.waiting.values() for future in futures if not future.done()):
            if error is None:
                future.cancel()
            else:
                future.set_exception(error)

    async def _ask(self, group: _Group) -> None:
        while group.open:
            try:
                await (self._streamed(group) if len(group.open) > 1 else self._whole(group))
            except ClientError as error:
                self._refused(group, error)

    def _refused(self, group: _Group, error: ClientError) -> None:
        """End the gets whose variables were refused, or all if none was. The other gets are sent again."""
        refused = {name: self._delivery.collected.refusal(name) for name in group.waiting}
        if not any(refused.values()):
            group.fail(error)
        for name, problem in refused.items():
            if problem is not None:
                group.answer(name, problem)

    async def _whole(self, group: _Group) -> None:
        results = await self._transport.run(self._delivery.delivered(group.open, group.timeout_s))
        for name, result in results.items():
            group.answer(name, result)

    async def _streamed(self, group: _Group) -> None:
        batch = await self._transport.run(self._delivery.opened(group.open))
        request = self._delivery.request(batch, group.open, group.timeout_s, stream=True)
        stream = ProgramStream(group.timeout_s)
        try:
            with batch.sent():
                async with self._transport.lines(request) as lines:
                    batch.enter()
                    async for line in lines:
                        news = stream.feed(line)
                        if news is not None and news.error is not None:
                            group.answer(news.name, self._delivery.explained(news.error))
                        elif news is not None and news.value is not None:
                            group.answer(news.name, news.value)
                    batch.accept()
        except (AnswerError, ConnectionFailedError) as error:
            if isinstance(error, AnswerError) and error.status not in MAY_PASS:
                raise
        if group.open:  # the stream broke off, or the gateway was busy
            await self._whole(group)
