"""When the garbage collector runs, in literal times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from plait.gateway.server.full_collections import (
    GROWTH_BYTES,
    LEAST_PAUSE_S,
    MOST_PAUSE_S,
    FullCollections,
    peak_bytes,
)


class Clock:
    """A clock that each full collection advances by `takes_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.takes_s = 0.0
        self.began_s: list[float] = []
        self._due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Callable[[], None], /) -> None:
        self._due.append((self.now_s + delay, callback))

    def collect(self) -> int:
        self.began_s.append(self.now_s)
        self.now_s += self.takes_s
        return 0

    def run_until(self, end_s: float) -> None:
        while self._due and self._due[0][0] <= end_s:
            self.now_s, callback = self._due.pop(0)
            callback()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock, thresholds = Clock(), gc.get_threshold()
    monkeypatch.setattr(gc, "collect", clock.collect)
    yield clock
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Memory:
    """A process whose memory has had a peak."""

    def __init__(self) -> None:
        self.peak_bytes = 100 * 2**20

    def __call__(self) -> int:
        return self.peak_bytes


def test_a_collection_comes_every_ten_minutes(clock: Clock) -> None:
    clock.takes_s = 0.01
    FullCollections(clock, Memory()).start()
    clock.run_until(2.1 * MOST_PAUSE_S)
    assert clock.began_s == pytest.approx(
        [0.0, MOST_PAUSE_S + LEAST_PAUSE_S, 2 * (MOST_PAUSE_S + LEAST_PAUSE_S)], rel=0.01
    )


def test_a_collection_comes_as_soon_as_memory_has_grown(clock: Clock) -> None:
    memory = Memory()
    FullCollections(clock, memory).start()
    memory.peak_bytes += GROWTH_BYTES - 1
    clock.run_until(10 * LEAST_PAUSE_S)
    assert clock.began_s == [0.0]
    memory.peak_bytes += 1
    clock.run_until(100 * LEAST_PAUSE_S)
    assert clock.began_s == [0.0, 11 * LEAST_PAUSE_S]


def test_a_long_collection_takes_no_more_than_its_share_of_the_time(clock: Clock) -> None:
    clock.takes_s = 0.5
    memory = Memory()
    FullCollections(clock, memory).start()
    for _ in range(4):
        memory.peak_bytes += GROWTH_BYTES
        clock.run_until(clock.now_s + 100.5)
    first_s = clock.takes_s + LEAST_PAUSE_S
    assert clock.began_s == pytest.approx([0.0, first_s, first_s + 100.5, first_s + 201.0, first_s + 301.5])


def test_the_peak_is_in_bytes() -> None:
    assert 2**24 < peak_bytes() < 2**40


def test_none_comes_by_itself(clock: Clock) -> None:
    FullCollections(clock).start()
    stats = gc.get_stats()[2]["collections"]
    kept: list[list[int]] = [[] for _ in range(200_000)]
    assert gc.get_stats()[2]["collections"] == stats
    assert len(kept) == 200_000
