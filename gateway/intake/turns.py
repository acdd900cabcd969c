"""Tenants take turns: `Turns` decides whose is next.

`LoopTurns` lets requests begin in turns while the loop is busy. Without this an event loop that gets more than it can
do is late by seconds, for every tenant and for `/health`. `TurnThreads` tokenizes in turns: a tenant's long prompts
delay its own prompts, not another tenant's.
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
"""A pass of the loop above this lets fewer requests begin in the next one, a pass below half of it more.

What other processes take of the CPU meanwhile does not count: fewer requests in a pass would not make it shorter.
"""

MEAN_OF_PASSES: Final = 16
"""The loop is late once the passes of about so many are long in the mean, not after one that was."""

FEWEST, MOST = 2, 64
"""Requests that begin in one pass. Of two, one tenant has one."""

STANDING_S: Final = 5.0
"""A burst may wait so long. If requests have waited all this time, more come than the loop can take."""

MOST_WAIT_S: Final = 0.25
"""Then a request is refused that has waited so long. Its client can ask another gateway, or again."""

REFUSED: Final = 0.5
"""So many are refused for each that begins. To refuse takes a quarter of the time to begin, and who is refused asks
again at once: if more were refused, the loop would do little else."""

MOST_WAITING = 4_000
"""Requests that wait. Beyond, those of tenants above their share are refused at once: each that waits holds a
connection."""

RETRY_AFTER_S: Final = 1.0

JobT = TypeVar("JobT")


class Turns(Generic[JobT]):
    """Jobs by tenant, of which at most `seats` have a turn at the same time.

    Tenants take turns, and so do a tenant's jobs. With two seats or more, one tenant never has all of them.
    """

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.length = 0  # jobs that wait
        self._waiting: OrderedDict[str, deque[JobT]] = OrderedDict()  # the next tenant first
        self._seated: dict[str, int] = {}
        self._taken = 0  # seats, by all tenants

    def waiting(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def __repr__(self) -> str:
        waiting = {tenant: len(jobs) for tenant, jobs in self._waiting.items()}
        return f"Turns(waiting={waiting}, seated={self._seated})"

    def add(self, tenant: str, job: JobT) -> None:
        self._waiting.setdefault(tenant, deque()).append(job)
        self.length += 1

    def sit(self, tenant: str) -> bool:
        """Give the tenant a turn at once, until `done`, unless jobs wait or it may have none."""
        seated = self._seated.get(tenant, 0)
        if self._waiting or self._taken >= self.seats or seated >= max(1, self.seats - 1):
            return False
        self._seated[tenant] = seated + 1
        self._taken += 1
        return True

    def take(self) -> tuple[str, JobT] | None:
        """The next job, which has a turn until `done`; None if no job may have one."""
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
        """A turn of the tenant's is over. A job that is not finished has to be added again."""
        self._taken -= 1
        self._seated[tenant] -= 1
        if not self._seated[tenant]:
            del self._seated[tenant]

    def all_done(self) -> None:
        self._seated.clear()
        self._taken = 0

    def remove(self, tenant: str, job: JobT) -> None:
        """Forget a job that waits; nothing happens if it has a turn."""
        jobs = self._waiting.get(tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            self.length -= 1
            if not jobs:
                del self._waiting[tenant]

    def expire(self, is_late: Callable[[JobT], bool], most: int) -> list[JobT]:
        """Forget the first jobs of each tenant that have waited too long, `most` at once, and return them."""
        late: list[JobT] = []
        for tenant, jobs in [*self._waiting.items()]:
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
    """Lets requests begin: some in each pass of the event loop, as many as keep the passes short.

    Tenants take turns. A pass goes from one run of the callbacks that are ready to the next.
    """

    def __init__(self) -> None:
        self._turns: Turns[_Request] = Turns(MOST)
        self._active = ActiveTenants()
        self._came_s: dict[str, float] = {}  # when tenants came last that `_active` was not told of, the latest last
        self._in_pass = False  # a request has begun in this pass
        self._began_s = self._began_cpu_s = 0.0
        self._free_s = 0.0  # when a request came and nobody waited
        self._pass_s = 0.0  # of passes of late, in the mean

    def __repr__(self) -> str:
        return f"LoopTurns({self._turns!r})"

    def may_begin(self, tenant: str) -> bool:
        """Whether it is the tenant's turn now, which is taken then. Else `begin` waits for it."""
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
        """Whether passes are long, so that who has more to do should wait. This pass counts in later ones."""
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
        """Raises `LimitError` for a request beyond what may wait."""
        for other, came_s in self._came_s.items():
            self._active.came(other, came_s)
        self._came_s.clear()
        share = MOST_WAITING * self._active.share(tenant, now_s)
        if self._turns.length >= MOST_WAITING and self._turns.waiting(tenant) >= share:
            raise _busy()

    def _let_begin(self) -> None:
        while (taken := self._turns.take()) is not None:
            _, request = taken
            if not request.turn.done():  # else its client has gone in this moment
                request.turn.set_result(None)
            if not self._in_pass:
                self._begin_pass(time.monotonic())

    def _begin_pass(self, now_s: float) -> None:
        """The first request of a pass has begun, or a piece of a large one has come."""
        self._in_pass, self._began_s, self._began_cpu_s = True, now_s, time.process_time()
        asyncio.get_running_loop().call_soon(self._passed)

    def _passed(self) -> None:
        """A pass is over: the requests that began in this pass have done their first part."""
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
    """A pool with all its threads running. By itself, a pool starts them one by one, when jobs happen to overlap."""
    pool, all_run = ThreadPoolExecutor(threads, thread_name_prefix=name), Barrier(threads)
    for _ in range(threads):
        pool.submit(all_run.wait)
    return pool
