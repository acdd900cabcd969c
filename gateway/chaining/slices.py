"""Slices of the event loop's time, in which the calls of programs are read, entered and started.

A program may have a thousand calls. Done in one piece, that would hold the loop for half a second, and every other call
with it. All such work shares `SLICE_S` of a turn. Then the loop serves what has come meanwhile, and the work goes on in
the next turn.
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
"""Of a turn of the loop, not counting the rest of the piece that is on then: a call next door notices little of it."""

WOKEN: Final = 16
"""Waiting tasks that a turn wakes. To start a call takes 0.2 to 0.5 ms, so more would only have to wait again."""

T = TypeVar("T")

Pieces = Generator[None, None, T]
"""Work that yields after each piece, of 1 ms at most, and returns its result."""


class Slices:
    """The slices of one event loop. Tenants take turns. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = loop_time_s) -> None:
        self._clock = clock
        self._ends_s: float | None = None  # when this turn's slice is used up; None: nobody has begun it
        self._numbers = count()
        # The next tenant first; of each a heap, the first that came on top.
        self._waiting: OrderedDict[str, list[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Slices(waiting={ {tenant: len(tasks) for tenant, tasks in self._waiting.items()} })"

    async def take(self, tenant: str) -> None:
        """Return while this turn's slice lasts, else in a later turn. Then the caller does one piece of its work."""
        number = None
        while self._is_used_up():
            number = next(self._numbers) if number is None else number
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heappush(self._waiting.setdefault(tenant, []), (number, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._wake(1)  # it was woken, and another can go on instead
                raise

    async def run(self, tenant: str, work: Pieces[T]) -> T:
        """Do all of a tenant's work, piece by piece; returns its result. Raises what it raises."""
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
        """Wake up to so many tasks, one of each tenant in turn."""
        while self._waiting and most:
            tenant, waiting = self._waiting.popitem(last=False)
            _, turn = heappop(waiting)
            if waiting:
                self._waiting[tenant] = waiting
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                most -= 1


class Entrance:
    """Where programs enter their sessions: one of a tenant at a time, so that each finds the room it was promised.

    Until a program is whole, other requests for its session wait: `whole`.
    """

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._turns: dict[str, asyncio.Lock] = {}  # by tenant
        self._sessions: dict[str, str] = {}  # the one that each tenant's program enters now

    async def run(self, tenant: str, session_id: str, work: Pieces[T]) -> T:
        """Do the work of entering a session, in the tenant's turn; returns its result. Raises what it raises."""
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
    """The result of work that nothing has to share a turn with."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
