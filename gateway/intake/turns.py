"""Fair queueing: tenants take turns (`Turns`, round robin).

`LoopTurns` limits how many requests begin in an iteration of the event loop. Without it, an overloaded loop would be
late by seconds, for every tenant and for `/health`. `LoopTurns` controls the number by the duration of iterations
(additive increase, multiplicative decrease), and refuses requests when the queue has not been empty for `STANDING_S`.
`TurnThreads` runs the tokenization of long prompts in turns, so that a tenant's prompts delay only its other prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier
from typing import Any, Final, Generic, TypeVar

from plait.backends.errors import LimitError
from plait.policy.admission.fair_shares import ActiveTenants

LONG_PASS_S: Final = 0.01
"""The target duration of a pass (an iteration of the loop). After a longer pass, half as many requests may begin in the
next pass; after a pass below half of the target, one more.

Only the process's CPU time counts: if other processes take the CPU, fewer requests would not make a pass shorter.
"""

MEAN_OF_PASSES: Final = 16
"""The loop is late if the moving average over about this many passes is above `LONG_PASS_S`."""

FEWEST, MOST = 2, 64
"""The limits of the number of requests that begin in one pass. With two, no tenant begins more than one."""

STANDING_S: Final = 5.0
"""The longest burst. If the queue has not been empty for longer, more requests come than the loop can take."""

MOST_WAIT_S: Final = 0.25
"""In such a standing queue, requests that have waited longer are refused, but not those of tenants with fewer than an
equal part of the queue. Their clients can try another gateway.
"""

REFUSED: Final = 0.5
"""Refusals for each request that begins. A refusal costs a quarter of a beginning, and its client retries at once: with
more refusals, the loop would do little else."""

MOST_WAITING = 4_000
"""The length of the queue beyond which requests of tenants above their share are refused at once, because each waiting
request keeps a connection open."""

RETRY_AFTER_S: Final = 1.0

JobT = TypeVar("JobT")


class Turns(Generic[JobT]):
    """A queue of jobs by tenant. At most `seats` jobs have a turn at the same time.

    Tenants take turns, and each tenant's jobs are FIFO. With two seats or more, no tenant can have all of them.
    """

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.length = 0  # the number of waiting jobs
        self._waiting: OrderedDict[str, deque[JobT]] = OrderedDict()  # the next tenant first
        self._seated: dict[str, int] = {}  # by tenant: its jobs that have a turn
        self._taken = 0  # the sum of `_seated`

    def waiting(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def __repr__(self) -> str:
        waiting = {tenant: len(jobs) for tenant, jobs in self._waiting.items()}
        return f"Turns(waiting={waiting}, seated={self._seated})"

    def add(self, tenant: str, job: JobT) -> None:
        self._waiting.setdefault(tenant, deque()).append(job)
        self.length += 1

    def sit(self, tenant: str) -> bool:
        """Give the tenant a turn at once, until `done`. False if jobs wait, or no seat is free for it."""
        seated = self._seated.get(tenant, 0)
        if self._waiting or self._taken >= self.seats or seated >= max(1, self.seats - 1):
            return False
        self._seated[tenant] = seated + 1
        self._taken += 1
        return True

    def take(self) -> tuple[str, JobT] | None:
        """Remove the next job, which has a turn until `done`; None if no job may have one."""
        if not self._waiting or self._taken >= self.seats:
            return None
        most = max(1, self.seats - 1)
        tenant = next((tenant for tenant in self._waiting if self._seated.get(tenant, 0) < most), None)
        if tenant is None:
            return None
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        self.length -= 1
        if jobs:
            self._waiting[tenant] = jobs
        self._seated[tenant] = self._seated.get(tenant, 0) + 1
        self._taken += 1
        return tenant, job

    def done(self, tenant: str) -> None:
        """End a turn of the tenant. A job that is not finished has to be added again."""
        self._taken -= 1
        self._seated[tenant] -= 1
        if not self._seated[tenant]:
            del self._seated[tenant]

    def all_done(self) -> None:
        self._seated.clear()
        self._taken = 0

    def remove(self, tenant: str, job: JobT) -> None:
        """Remove a waiting job. No effect on one that has a turn."""
        jobs = self._waiting.get(tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            self.length -= 1
            if not jobs:
                del self._waiting[tenant]

    def expire(self, is_late: Callable[[JobT], bool], most: int) -> list[JobT]:
        """Remove and return at most `most` jobs that have waited too long, the oldest of each tenant first.

        A tenant with fewer waiting jobs than an equal part keeps them: they have their turns soon.
        """
        late: list[JobT] = []
        equal = self.length / max(1, len(self._waiting))
        for tenant, jobs in [*self._waiting.items()]:
            if len(jobs) < equal:
                continue
            while jobs and len(late) < most and is_late(jobs[0]):
                late.append(jobs.popleft())
            if not jobs:
                del self._waiting[tenant]
        self.length -= len(late)
        return late


@dataclass(slots=True, eq=False)
class _Request:
    arrived_s: float
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LoopTurns:
    """Admits requests to the event loop: in each pass, as many as keep the passes short. Tenants take turns."""

    def __init__(self) -> None:
        self._turns: Turns[_Request] = Turns(MOST)
        self._active = ActiveTenants()
        self._came_s: dict[str, float] = {}  # tenants' last requests that `_active` does not know, the latest last
        self._in_pass = False  # a request has begun in this pass
        self._began_s = self._began_cpu_s = 0.0
        self._free_s = 0.0  # the last time at which the queue was empty
        self._pass_s = 0.0  # the moving average of the duration of passes

    def __repr__(self) -> str:
        return f"LoopTurns({self._turns!r})"

    def may_begin(self, tenant: str) -> bool:
        """Take a turn of the tenant at once. False if it has to wait for one (`begin`)."""
        if not self._turns.sit(tenant):
            return False
        now_s = time.monotonic()
        self._came_s.pop(tenant, None)
        self._came_s[tenant] = now_s
        self._free_s = now_s
        if not self._in_pass:
            self._begin_pass(now_s)
        return True

    def is_late(self) -> bool:
        """Whether passes are long, so that large work should wait. Also measures this pass."""
        if not self._in_pass:
            self._begin_pass(time.monotonic())
        return self._pass_s > LONG_PASS_S

    async def begin(self, tenant: str) -> None:
        """Wait for the tenant's turn. Raises `LimitError` if it does not come in time."""
        if self.may_begin(tenant):
            return
        now_s = time.monotonic()
        self._came_s.pop(tenant, None)
        self._came_s[tenant] = now_s
        if self._turns.length:
            self._check(tenant, now_s)
        else:
            self._free_s = now_s
        request = _Request(now_s)
        self._turns.add(tenant, request)
        self._let_begin()
        if not request.turn.done():
            try:
                await request.turn
            finally:
                self._turns.remove(tenant, request)

    def _check(self, tenant: str, now_s: float) -> None:
        """Raises `LimitError` if the queue is full and the tenant above its share."""
        for other, came_s in self._came_s.items():
            self._active.came(other, came_s)
        self._came_s.clear()
        share = MOST_WAITING * self._active.share(tenant, now_s)
        if self._turns.length >= MOST_WAITING and self._turns.waiting(tenant) >= share:
            raise _busy()

    def _let_begin(self) -> None:
        while (taken := self._turns.take()) is not None:
            _, request = taken
            if not request.turn.done():  # a done one was cancelled with its client
                request.turn.set_result(None)
            if not self._in_pass:
                self._begin_pass(time.monotonic())

    def _begin_pass(self, now_s: float) -> None:
        """Start to measure a pass, at its first request or piece of a large body."""
        self._in_pass, self._began_s, self._began_cpu_s = True, now_s, time.process_time()
        asyncio.get_running_loop().call_soon(self._passed)

    def _passed(self) -> None:
        """A pass is over: adjust the number of seats, and let the next requests begin."""
        now_s = time.monotonic()
        self._turns.all_done()
        self._in_pass = False
        seats, took_s = self._turns.seats, now_s - self._began_s
        if took_s > LONG_PASS_S / 2:
            took_s = min(took_s, time.process_time() - self._began_cpu_s)
        self._pass_s += (took_s - self._pass_s) / MEAN_OF_PASSES
        if took_s > LONG_PASS_S:
            seats = max(FEWEST, seats // 2)
        elif took_s < LONG_PASS_S / 2 and seats < MOST:
            seats += 1
        self._turns.seats = seats
        if self._turns.length and now_s - self._free_s > STANDING_S:
            self._refuse_late(now_s, round(REFUSED * seats))
        if self._turns.length:
            self._let_begin()

    def _refuse_late(self, now_s: float, most: int) -> None:
        for request in self._turns.expire(lambda request: now_s - request.arrived_s > MOST_WAIT_S, most):
            if not request.turn.done():
                request.turn.set_exception(_busy())


def _busy() -> LimitError:
    return LimitError(
        "This gateway has more requests than it can take. Send fewer a second, or ask another one.",
        code="gateway_busy",
        retry_after_s=RETRY_AFTER_S,
    )


MAX_WAITING_BYTES = 128 * 2**20
"""Four of the largest bodies. Each takes some four times its size in memory: the body, its texts, the rendered chat and
the ids."""

T = TypeVar("T")

Steps = Generator[Any, None, T]
"""Work that yields after each turn, and returns its result. The yielded values are ignored here."""


@dataclass(slots=True, eq=False)
class _Job:
    steps: Steps[Any]
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TurnThreads:
    """Runs jobs turn by turn on `threads` threads, for one event loop.

    The input of all waiting and running jobs may have `max_bytes`. A tenant with less than its share may exceed this.
    """

    def __init__(
        self, threads: int, name: str, executor: Executor | None = None, *, max_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._turns: Turns[_Job] = Turns(threads)
        self._executor = executor or _running(threads, name)
        self._held_bytes: Counter[str] = Counter()
        self._max_bytes = max_bytes

    async def run(self, tenant: str, steps: Steps[T], size: int) -> T:
        """Run a tenant's job, whose input has `size` bytes. Raises what the job raises, and `LimitError`.

        A job whose caller is cancelled ends after its current turn.
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
        """Raises `LimitError` beyond the limit, unless the tenant has less than its share."""
        own = self._held_bytes.get(tenant, 0) + size
        share = self._max_bytes / len(self._held_bytes.keys() | {tenant})
        if own > share and self._held_bytes.total() + size > self._max_bytes:
            raise LimitError(
                f"{self._held_bytes.total()} bytes of prompts wait to be tokenized, {own - size} of them of this key. "
                "Send fewer at once.",
                code="too_many_waiting_prompts",
                retry_after_s=RETRY_AFTER_S,
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
    """A pool whose threads all run already. By itself, a pool starts a thread only when jobs overlap."""
    pool, all_run = ThreadPoolExecutor(threads, thread_name_prefix=name), Barrier(threads)
    for _ in range(threads):
        pool.submit(all_run.wait)
    return pool
