"""Lets the API server talk to the scheduler, by methods of EngineCore that vLLM's utility channel can call.

One method returns reports, the other changes objectives of calls. vLLM runs them between two iterations. `install` adds
the methods to EngineCore when the engine core's process builds the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from plait.backends.adapter.required_names import load

if TYPE_CHECKING:
    from plait.backends.vllm.driver import VllmDriver

METHOD = "plait_cache_state"
CHANGE_METHOD = "plait_call_objectives"
"""The methods' names in EngineCore."""

MAX_WAITING = 64
"""How many requests for reports may wait at once. An API server gives up a request without notice."""


class _Waiting(NamedTuple):
    since: int
    epoch: str | None
    gateway: str | None
    result: Future[bytes]


class CacheReports:
    """One engine's reports as msgpack, at once or after the next change.

    A gateway waits for one report at a time. If a gateway asks again, it has given up its earlier request.
    """

    def __init__(self, driver: VllmDriver) -> None:
        self._driver = driver
        self._waiting: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self._published = driver.cursor

    def report(self, since: int | None, epoch: str | None, gateway: str | None, wait: bool) -> bytes | Future[bytes]:
        """The report since a cursor of `epoch` for a gateway. With `wait`, a future if there is no change yet."""
        if not wait or since is None or self._driver.has_news(since, epoch, gateway):
            return self._encoded(since, epoch, gateway)
        waiting = _Waiting(since, epoch, gateway, Future())
        earlier = self._waiting.pop(gateway, None) if gateway else None
        if earlier is None and len(self._waiting) == MAX_WAITING:
            earlier = self._waiting.popitem(last=False)[1]
        if earlier is not None:
            self._answer(earlier)
        self._waiting[gateway or waiting.result] = waiting
        return waiting.result

    def publish(self) -> None:
        """Answer the waiting requests whose gateways a change concerns."""
        if not self._waiting or self._driver.cursor == self._published:
            return
        self._published, has_news = self._driver.cursor, self._driver.has_news
        told = [key for key, one in self._waiting.items() if has_news(one.since, one.epoch, one.gateway)]
        for key in told:
            self._answer(self._waiting.pop(key))

    def _answer(self, waiting: _Waiting) -> None:
        waiting.result.set_result(self._encoded(waiting.since, waiting.epoch, waiting.gateway))

    def _encoded(self, since: int | None, epoch: str | None, gateway: str | None) -> bytes:
        return msgspec.msgpack.encode(self._driver.report(since, epoch, gateway))


def install() -> None:
    """Add the methods to EngineCore, once."""
    engine_core = load("vllm.v1.engine.core.EngineCore")
    for name, method in ((METHOD, _cache_state), (CHANGE_METHOD, _call_objectives)):
        if not hasattr(engine_core, name):
            setattr(engine_core, name, method)


def _cache_state(
    core: Any, since: int | None, epoch: str | None, gateway: str | None, wait: bool
) -> bytes | Future[bytes]:
    reports: CacheReports = core.scheduler.cache_reports
    return reports.report(since, epoch, gateway, wait)


def _call_objectives(core: Any, body: str) -> int:
    driver: VllmDriver = core.scheduler.plait
    return driver.change_objectives(body.encode())
