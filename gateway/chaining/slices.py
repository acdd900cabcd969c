"""Time slices: cooperative scheduling of the work that reads, enters and starts the calls of programs.

A program may have a thousand calls. Entered in one piece, it would block the event loop, and so every other call, for
half a second. All such work together may use `SLICE_S` of each iteration of the event loop, and continues in the next
one. Tenants take turns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import Final, TypeVar

from plait.gateway.timer import loop_time_s

SLICE_S: Final = 0.005
"""The slice of one loop iteration. A piece that runs at the end of the slice is not interrupted; pieces are short."""

WOKEN: Final = 16
"""Tasks woken in an iteration. Starting a call takes 0.2 to 0.5 ms, so more tasks would find the slice used up."""

T = TypeVar("T")

Pieces = Generator[None, None, T]
"""Work that yields after each piece, of 1 ms at most, and returns its result."""


class Slices:
    """The slices of one event loop."""

    def __init__(self, clock: Callable[[], float] = loop_time_s) -> None:
        self._clock = clock
        self._ends_s: float | None = None  # the end of this iteration's slice; None: it has not begun
        self._numbers = count()
        # By tenant, the next tenant first: a heap of tasks, the longest waiting one on top.
        self._waiting: OrderedDict[str, list[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Slices(waiting={ {tenant: len(tasks) for tenant, tasks in self._waiting.items()} })"

    async def take(self, tenant: str) -> None:
        """Wait for an iteration whose slice is not used up. The caller then does one piece of work."""
        number = None
        while self._is_used_up():
            number = next(self._numbers) if number is None else number
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heappush(self._waiting.setdefault(tenant, []), (number, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._wake(1)  # pass the wake-up on to another task
                raise

    async def run(self, tenant: str, work: Pieces[T]) -> T:
        """Do a tenant's work, one piece for each `take`. Returns its result, or raises what it raises."""
        try:
            while True:
                await self.take(tenant)
                next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            work.close()

    def _is_used_up(self) -> bool:
        now_s = self._clock()
        if self._ends_s is None:
            self._ends_s = now_s + SLICE_S
            asyncio.get_running_loop().call_soon(self._next_turn)
            return False
        return now_s >= self._ends_s

    def _next_turn(self) -> None:
        self._ends_s = None
        self._wake(WOKEN)

    def _wake(self, most: int) -> None:
        """Wake at most `most` tasks, round robin over tenants."""
        while self._waiting and most:
            tenant, waiting = self._waiting.popitem(last=False)
            _, turn = heappop(waiting)
            if waiting:
                self._waiting[tenant] = waiting
            if not turn.done():  # a done one was cancelled
                turn.set_result(None)
                most -= 1


class Entrance:
    """Serializes the programs of a tenant while they enter, so that each still has the room that its check found.

    Other requests for the session wait until the program is whole (`whole`).
    """

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._turns: dict[str, asyncio.Lock] = {}  # by tenant
        self._sessions: dict[str, str] = {}  # by tenant: the session that a program is entering

    async def run(self, tenant: str, session_id: str, work: Pieces[T]) -> T:
        """Do the work of entering a session, one program of a tenant at a time. Returns its result."""
        async with self._turns.setdefault(tenant, asyncio.Lock()):
            self._sessions[tenant] = session_id
            try:
                return await self._slices.run(tenant, work)
            finally:
                del self._sessions[tenant]

    async def whole(self, tenant: str, session_id: str | None) -> None:
        """Wait while a program enters the session."""
        if self._sessions and session_id is not None and self._sessions.get(tenant) == session_id:
            async with self._turns[tenant]:
                pass


def at_once(work: Pieces[T]) -> T:
    """Do all the work without yielding to the event loop, for callers without one. Returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
