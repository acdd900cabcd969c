"""Tokenization in turns: a tenant's long prompts delay its own prompts, not another tenant's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier
from typing import Any, TypeVar

from plait.backends.errors import LimitError
from plait.gateway.calls.turns import Turns

MAX_WAITING_BYTES = 128 * 2**20
"""Four of the largest bodies. Each takes some four times its size until it is done: the body, its texts, the rendered
chat and the ids."""

T = TypeVar("T")

Steps = Generator[Any, None, T]
"""Work that yields after each turn, and returns its result. What it yields is not looked at here."""


@dataclass(slots=True, eq=False)
class _Job:
    steps: Steps[Any]
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TurnThreads:
    """Runs jobs turn by turn on `threads` threads; call it from one event loop.

    The jobs that wait or run are made from at most `max_bytes`. A tenant with less than its share is served all the
    same.
    """

    def __init__(
        self, threads: int, name: str, executor: Executor | None = None, *, max_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._turns: Turns[_Job] = Turns(threads)
        self._executor = executor or _running(threads, name)
        self._held_bytes: Counter[str] = Counter()
        self._max_bytes = max_bytes

    async def run(self, tenant: str, steps: Steps[T], size: int) -> T:
        """The result of a tenant's job, made from `size` bytes. Raises what it raises, and `LimitError`.

        A job whose caller is cancelled ends after the turn that it has.
        """
        self._check(tenant, size)
        job = _Job(steps)
        self._held_bytes[tenant] += size
        self._turns.add(tenant, job)
        self._start()
        try:
            result: T = await job.result
            return result
        finally:
            self._turns.remove(tenant, job)
            self._held_bytes[tenant] -= size
            if not self._held_bytes[tenant]:
                del self._held_bytes[tenant]

    def _check(self, tenant: str, size: int) -> None:
        """Raises `LimitError` for a job beyond the limit, unless its tenant has less than its share."""
        own = self._held_bytes.get(tenant, 0) + size
        share = self._max_bytes / len(self._held_bytes.keys() | {tenant})
        if own > share and self._held_bytes.total() + size > self._max_bytes:
            raise LimitError(
                f"{self._held_bytes.total()} bytes of prompts wait to be tokenized, {own - size} of them of this key. "
                "Send fewer at once.",
                code="too_many_waiting_prompts",
                retry_after_s=1.0,
            )

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while (taken := self._turns.take()) is not None:
            tenant, job = taken
            turn = loop.run_in_executor(self._executor, _advance, job.steps)
            turn.add_done_callback(partial(self._ended, tenant, job))

    def _ended(self, tenant: str, job: _Job, turn: asyncio.Future[tuple[bool, Any]]) -> None:
        self._turns.done(tenant)
        if not job.result.done() and not turn.cancelled():
            error = turn.exception()
            if error is not None:
                job.result.set_exception(error)
            elif turn.result()[0]:
                job.result.set_result(turn.result()[1])
            else:
                self._turns.add(tenant, job)
        self._start()


def _advance(steps: Steps[Any]) -> tuple[bool, Any]:
    """One turn: whether the work is finished, and its result."""
    try:
        next(steps)
    except StopIteration as end:
        return True, end.value
    return False, None


def _running(threads: int, name: str) -> Executor:
    """A pool with all its threads running. By itself, a pool starts them one by one, when jobs happen to overlap."""
    pool, all_run = ThreadPoolExecutor(threads, thread_name_prefix=name), Barrier(threads)
    for _ in range(threads):
        pool.submit(all_run.wait)
    return pool
