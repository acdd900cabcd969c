"""Lets the API server talk to the scheduler, by methods of EngineCore that vLLM's utility channel can call.

One asks for reports, the other changes objectives of calls. vLLM runs them between two iterations. The scheduler adds
them when it is built, in the engine core's process. Nothing is registered in advance.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from plait.backends.adapter.required_names import load

if TYPE_CHECKING:
    from plait.backends.vllm.driver import Driver

METHOD = "plait_cache_state"
CHANGE_METHOD = "plait_call_objectives"
"""The methods' names in EngineCore."""

MAX_WAITING = 16
"""At most this many reports wait at once, because an API server stops waiting without notice."""


class _Waiting(NamedTuple):
    since: int
    epoch: str | None
    result: Future[bytes]


class CacheReports:
    """Reports of one engine's cache as msgpack, at once or after the next change."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._waiting: deque[_Waiting] = deque()
        self._published = driver.cursor

    def report(self, since: int | None, epoch: str | None, wait: bool) -> bytes | Future[bytes]:
        """The report since a cursor of `epoch`. With `wait` it is a future as long as nothing has changed."""
        driver = self._driver
        if not wait or since is None or since != driver.cursor or epoch not in {None, driver.epoch}:
            return self._encoded(since, epoch)
        if len(self._waiting) == MAX_WAITING:
            self._answer(self._waiting.popleft())
        waiting = _Waiting(since, epoch, Future())
        self._waiting.append(waiting)
        return waiting.result

    def publish(self) -> None:
        """Answer the waiting requests if the cache has changed."""
        if self._waiting and self._driver.cursor != self._published:
            while self._waiting:
                self._answer(self._waiting.popleft())
        self._published = self._driver.cursor

    def _answer(self, waiting: _Waiting) -> None:
        waiting.result.set_result(self._encoded(waiting.since, waiting.epoch))

    def _encoded(self, since: int | None, epoch: str | None) -> bytes:
        return msgspec.msgpack.encode(self._driver.report(since, epoch))


def install() -> None:
    """Add the methods to EngineCore, once."""
    engine_core = load("vllm.v1.engine.core.EngineCore")
    for name, method in ((METHOD, _cache_state), (CHANGE_METHOD, _call_objectives)):
        if not hasattr(engine_core, name):
            setattr(engine_core, name, method)


def _cache_state(core: Any, since: int | None, epoch: str | None, wait: bool) -> bytes | Future[bytes]:
    reports: CacheReports = core.scheduler.cache_reports
    return reports.report(since, epoch, wait)


def _call_objectives(core: Any, body: str) -> int:
    driver: Driver = core.scheduler.plait
    return driver.change_objectives(body.encode())
