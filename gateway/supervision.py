"""Supervises long-lived tasks: one that fails is logged, counted and restarted, so that no bug ends it for good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import structlog
from prometheus_client import CollectorRegistry, Counter

RESTART_AFTER_S = 1.0

log = structlog.get_logger(__name__)


class Supervisor:
    """Runs tasks until `close`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._restarts = Counter(
            "plait_task_restarts", "Long-lived tasks that failed and were restarted", ["task"], registry=registry
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `work` as a task, again whenever it raises, until it returns."""
        task = asyncio.create_task(self._run(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, name: str) -> None:
        """Cancel the tasks with this name. Cancelled work only cleans up, and does not run on."""
        for task in self._tasks:
            if task.get_name() == name:
                task.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("task failed and is restarted", task=name)
                self._restarts.labels(name.partition(":")[0]).inc()
                await asyncio.sleep(RESTART_AFTER_S)
            else:
                return
