"""Those who wait until what they have appended is committed."""

from __future__ import annotations

import asyncio


class Waiters:
    """The loop adds them and tells them; the store's thread looks whether there is anybody to be told.

    Who still waits is in the list all the time, so that a commit which comes while the loop looks at them is heard.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, asyncio.Future[bool]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, number: int) -> asyncio.Future[bool]:
        """One who waits until so many batches are committed: whether they are, once that can be said."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, waiter))
        return waiter

    def tell(self, committed: int, *, is_over: bool) -> None:
        """So many batches are committed. If that `is_over`, all others hear that theirs are not."""
        self._waiting = [
            (number, one) for number, one in self._waiting if not _is_told(one, number <= committed, is_over)
        ]


def _is_told(waiter: asyncio.Future[bool], is_written: bool, is_over: bool) -> bool:
    if not waiter.done() and (is_written or is_over):
        waiter.set_result(is_written)
    return waiter.done()
