"""The movable timer, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from plait.backends.http.connection import Deadline


class FakeLoop:
    """A clock and one timer, which is all that a deadline uses of an event loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.armed: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, callback: Callable[[], None]) -> FakeTimer:
        self.armed.append((at_s, callback))
        return FakeTimer(self, self.armed[-1])

    def run_to(self, now_s: float) -> None:
        while self.armed and min(self.armed)[0] <= now_s:
            at_s, callback = self.armed.pop(0)
            self.now_s = at_s
            callback()
        self.now_s = now_s


class FakeTimer:
    def __init__(self, loop: FakeLoop, entry: tuple[float, Callable[[], None]]) -> None:
        self._loop = loop
        self._entry = entry

    def cancel(self) -> None:
        self._loop.armed.remove(self._entry)


def deadline() -> tuple[FakeLoop, Deadline, list[float]]:
    loop = FakeLoop()
    expired: list[float] = []
    return loop, Deadline(cast("asyncio.AbstractEventLoop", loop), lambda: expired.append(loop.now_s)), expired


def test_it_expires_when_it_was_set_to() -> None:
    loop, timer, expired = deadline()
    timer.move(5.0)
    loop.run_to(4.9)
    assert expired == []
    loop.run_to(100.0)
    assert expired == [5.0]


def test_moves_to_later_leave_the_timer_alone_until_it_fires() -> None:
    loop, timer, expired = deadline()
    timer.move(5.0)
    for now_s in (1.0, 2.0, 3.0):
        loop.run_to(now_s)
        timer.move(5.0)
    assert [at_s for at_s, _ in loop.armed] == [5.0]
    loop.run_to(5.0)
    assert expired == []
    assert [at_s for at_s, _ in loop.armed] == [8.0]
    loop.run_to(100.0)
    assert expired == [8.0]


def test_a_move_to_sooner_replaces_the_timer() -> None:
    loop, timer, expired = deadline()
    timer.move(600.0)
    timer.move(4.0)
    assert [at_s for at_s, _ in loop.armed] == [4.0]
    loop.run_to(700.0)
    assert expired == [4.0]


def test_a_timer_that_fires_a_clock_step_early_has_expired() -> None:
    loop, timer, expired = deadline()
    timer.move(5.0)
    (_, fire), *_ = loop.armed
    loop.armed.clear()
    loop.now_s = 4.9995
    fire()
    assert expired == [4.9995]


def test_once_cancelled_it_expires_only_if_moved_again() -> None:
    loop, timer, expired = deadline()
    timer.move(5.0)
    timer.cancel()
    timer.cancel()
    loop.run_to(10.0)
    assert (expired, loop.armed) == ([], [])
    timer.move(1.0)
    loop.run_to(20.0)
    assert expired == [11.0]
