"""The tasks that wait until the batches that they have appended are committed."""

from __future__ import annotations

import asyncio


class Waiters:
    """A list of futures. The loop adds and resolves them; the store's thread only asks whether there are any.

    `tell` replaces the list in one assignment, so that the thread never misses a waiter that is still in it.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, asyncio.Future[bool]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, number: int) -> asyncio.Future[bool]:
        """The future of whether the first `number` batches are committed."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, waiter))
        return waiter

    def tell(self, committed: int, *, is_over: bool) -> None:
        """Resolve the waiters of the first `committed` batches. If writing `is_over`, all others get False."""
        self._waiting = [
            (number, one) for number, one in self._waiting if not _is_told(one, number <= committed, is_over)
        ]


def _is_told(waiter: asyncio.Future[bool], is_written: bool, is_over: bool) -> bool:
    if not waiter.done() and (is_written or is_over):
        waiter.set_result(is_written)
    return waiter.done()
