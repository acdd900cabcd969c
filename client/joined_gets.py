"""Gets that tasks of an event loop make at the same time: they travel in one request, and each has its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from plait.client.delivery import Delivery, Result, raised
from plait.client.errors import AnswerError, ClientError, ConnectionFailedError
from plait.client.flow import MAY_PASS
from plait.client.program_stream import ProgramStream
from plait.client.transport import AsyncTransport


@dataclass(slots=True, eq=False)
class _Group:
    """Gets with the same time-out: the criteria of each variable, and who waits for it."""

    timeout_s: float
    criteria: dict[str, object] = field(default_factory=dict)
    waiting: dict[str, list[asyncio.Future[Result]]] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    def takes(self, name: str, criteria: object, timeout_s: float) -> bool:
        """Whether this get can join."""
        return timeout_s == self.timeout_s and self.criteria.get(name, criteria) == criteria

    def answer(self, name: str, result: Result) -> None:
        """The get of a variable has ended."""
        for future in self.waiting.pop(name, ()):
            if not future.done():
                future.set_result(result)

    def fail(self, error: ClientError) -> None:
        """All gets have ended with an error."""
        for name in list(self.waiting):
            self.answer(name, error)

    @property
    def open(self) -> Mapping[str, object]:
        """The criteria of the gets that somebody still waits for."""
        wanted = {name for name, futures in self.waiting.items() if not all(future.done() for future in futures)}
        return {name: criteria for name, criteria in self.criteria.items() if name in wanted}


class JoinedGets:
    """The gets of a session's tasks. Those of one turn of the event loop are one request with all that was collected.

    A request for one variable has one answer. A request for several is a stream, since a task goes on as soon as its
    own value is there.
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
                group.task.cancel()  # nobody else waits
            raise

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        groups, self._next = self._next, []
        for group in groups:
            if group.open:
                group.task = loop.create_task(self._ask(group))
                self._tasks.add(group.task)
                group.task.add_done_callback(partial(self._ended, group))

    def _ended(self, group: _Group, task: asyncio.Task[None]) -> None:
        """No get waits for a request that has ended, in whatever way."""
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
        """End the gets that need what was refused; all, if none does. The others are asked again."""
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
