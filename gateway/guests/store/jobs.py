"""The jobs that the store's thread does for the event loop, besides writing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import structlog

from plait.gateway.admission.shares import REGULAR_S
from plait.gateway.guests.store.event_log import RefusedDataError, StoreError

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Work for the thread, to be done once `after` batches are written. `done` gets the result in the event loop."""

    work: Callable[[], Any]
    after: int
    done: asyncio.Future[Any] | None

    def succeed(self, result: object) -> None:
        """Called in the thread."""
        if self.done is not None:
            self._settle(self.done, self.done.set_result, result)

    def fail(self, error: StoreError) -> None:
        """Called in the thread."""
        if self.done is not None:
            self._settle(self.done, self.done.set_exception, error)

    def _settle(self, done: asyncio.Future[Any], settle: Callable[[Any], None], value: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            done.get_loop().call_soon_threadsafe(lambda: None if done.done() else settle(value))


class Jobs:
    """The queue of jobs. The loop calls `add` and `is_late`, the thread all other methods."""

    def __init__(self) -> None:
        self.regular: Callable[[], None] | None = None
        """The job that the thread does each `REGULAR_S`, however busy the event loop is. It may raise `StoreError`."""
        self.refused = 0
        """Jobs whose data the database has refused."""
        self._regular_due_s = 0.0
        self._waiting = deque[StoreJob]()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def pause_s(self) -> float:
        """Seconds until the regular job is due."""
        return inf if self.regular is None else max(0.0, self._regular_due_s - time.monotonic())

    def is_late(self, by_s: float) -> bool:
        """Whether the regular job is overdue by so long. False before its first time."""
        return 0.0 < self._regular_due_s < time.monotonic() - by_s

    def add(self, work: Callable[[], Any], after: int) -> asyncio.Future[Any]:
        """Queue a job, and return the future of its result."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(StoreJob(work, after, done))
        return done

    def due(self, written: int) -> Iterator[StoreJob]:
        """Remove and yield the jobs that may be done now that `written` batches are written."""
        if self.regular is not None and not self.pause_s:
            self._regular_due_s = time.monotonic() + REGULAR_S
            yield StoreJob(self.regular, 0, None)
        while self._waiting and self._waiting[0].after <= written:
            yield self._waiting.popleft()

    def refuse(self, job: StoreJob, error: RefusedDataError) -> None:
        """The database refuses the job's data. Other jobs go on."""
        self.refused += 1
        log.error("the store refuses a question", problem=str(error))
        job.fail(error)

    def give_up(self, problem: str) -> None:
        """Fail all jobs."""
        while self._waiting:
            self._waiting.popleft().fail(StoreError(problem))
