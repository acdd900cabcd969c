"""What the event loop asks the store's thread to do, besides writing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from plait.gateway.store.event_log import StoreError


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Work for the thread, once so many batches are written. Its result is `done`, in the event loop."""

    work: Callable[[], Any]
    after: int
    done: asyncio.Future[Any]

    def run(self) -> None:
        """In the thread: do it. Raises the `StoreError` that it fails with; who has asked gets it, too."""
        try:
            result = self.work()
        except StoreError as error:
            self.fail(error)
            raise
        self._settle(lambda: self.done.set_result(result))

    def fail(self, error: StoreError) -> None:
        """In the thread: it is not done."""
        self._settle(lambda: self.done.set_exception(error))

    def _settle(self, tell: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.done.get_loop().call_soon_threadsafe(lambda: None if self.done.done() else tell())


class Jobs:
    """The jobs that wait. The loop adds them, the thread takes them."""

    def __init__(self) -> None:
        self._waiting = deque[StoreJob]()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, work: Callable[[], Any], after: int) -> asyncio.Future[Any]:
        """In the loop: one more; returns its result to come."""
        job = StoreJob(work, after, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        return job.done

    def due(self, written: int) -> Iterator[StoreJob]:
        """In the thread: those that may be done when so many batches are written."""
        while self._waiting and self._waiting[0].after <= written:
            yield self._waiting.popleft()

    def give_up(self, problem: str) -> None:
        """In the thread: none of them can be done now."""
        while self._waiting:
            self._waiting.popleft().fail(StoreError(problem))
