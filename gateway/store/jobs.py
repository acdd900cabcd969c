"""What the event loop asks the store's thread to do, besides writing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import structlog

from plait.gateway.store.event_log import RefusedDataError, StoreError

REGULAR_S: Final = 1.0
"""Of a lease of 5 s, which is renewed so often, four renewals may fail."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Work for the thread, once so many batches are written. Its result is `done`, in the event loop, if that asked."""

    work: Callable[[], Any]
    after: int
    done: asyncio.Future[Any] | None

    def succeed(self, result: object) -> None:
        """In the thread: it is done."""
        if self.done is not None:
            self._settle(self.done, self.done.set_result, result)

    def fail(self, error: StoreError) -> None:
        """In the thread: it is not done."""
        if self.done is not None:
            self._settle(self.done, self.done.set_exception, error)

    def _settle(self, done: asyncio.Future[Any], settle: Callable[[Any], None], value: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            done.get_loop().call_soon_threadsafe(lambda: None if done.done() else settle(value))


class Jobs:
    """The jobs that wait. The loop adds them, the thread takes them."""

    def __init__(self) -> None:
        self.regular: Callable[[], None] | None = None
        """What the thread does each `REGULAR_S`, however busy the event loop is. It may raise `StoreError`."""
        self.refused = 0
        """Jobs that the log has refused so far, because of their own data."""
        self._regular_due_s = 0.0
        self._waiting = deque[StoreJob]()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def pause_s(self) -> float:
        """How long the thread may sleep."""
        return inf if self.regular is None else max(0.0, self._regular_due_s - time.monotonic())

    def add(self, work: Callable[[], Any], after: int) -> asyncio.Future[Any]:
        """In the loop: one more; returns its result to come."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(StoreJob(work, after, done))
        return done

    def due(self, written: int) -> Iterator[StoreJob]:
        """In the thread: those that may be done when so many batches are written."""
        if self.regular is not None and not self.pause_s:
            self._regular_due_s = time.monotonic() + REGULAR_S
            yield StoreJob(self.regular, 0, None)
        while self._waiting and self._waiting[0].after <= written:
            yield self._waiting.popleft()

    def refuse(self, job: StoreJob, error: RefusedDataError) -> None:
        """In the thread: the log refuses the job's data, and other jobs go on."""
        self.refused += 1
        log.error("the store refuses a question", problem=str(error))
        job.fail(error)

    def give_up(self, problem: str) -> None:
        """In the thread: none of them can be done now."""
        while self._waiting:
            self._waiting.popleft().fail(StoreError(problem))
