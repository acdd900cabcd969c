"""Fair queueing: tenants share the event loop and the tokenizer's threads by what their work costs (`Turns`).

`LoopTurns` is the account of the event loop's CPU time. An iteration of the loop (a pass) has a budget for work that
can wait: requests that begin, and the pieces of long work. What is left waits for the next pass, the tenant that has
used least first. Without it, an overloaded loop would be late by seconds, for every tenant and for `/health`.
`TurnThreads` runs the tokenization of long prompts in turns, so that a tenant's prompts delay only its other prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from threading import Barrier
from types import coroutine
from typing import Any, Final, Generic, TypeVar

import structlog

from plait.backends.errors import LimitError
from plait.gateway.timer import loop_time_s
from plait.policy.admission.fair_shares import ActiveTenants

LONG_PASS_S: Final = 0.01
"""The target CPU time of a pass. The budget is what work that cannot wait, such as relaying answers, leaves of it.

Only the thread's CPU time counts: if other processes take the CPU, less work would not make a pass shorter.
"""

LEAST_S: Final = 0.002
"""The least budget, so that requests begin even while relaying takes all the time."""

MEAN_OF_PASSES: Final = 16
"""Moving averages are over about this many passes or steps."""

SLICE_S: Final = 0.005
"""Long work yields to the event loop after this much CPU time."""

LONG_BYTES: Final = 2**20
"""Work on more bytes is long: to decode them takes a slice."""

STANDING_S: Final = 5.0
"""The longest burst. If the queue has not been empty for longer, more requests come than the loop can take."""

MOST_WAIT_S: Final = 0.25
"""In such a standing queue, requests that have waited longer are refused, but not those of tenants with fewer than an
equal part of the queue. Their clients can try another gateway.
"""

STILL_S: Final = 1.0
"""In a longer pass the gateway or its machine has stood still. Its time counts for no standing queue."""

log = structlog.get_logger(__name__)

REFUSED: Final = 0.5
"""Refusals for each request that begins. A refusal costs a quarter of a beginning, and its client retries at once: with
more refusals, the loop would do little else."""

MOST_WAITING = 4_000
"""The length of the queue beyond which requests of tenants above their share are refused at once, because each waiting
request keeps a connection open."""

RETRY_AFTER_S: Final = 1.0

JobT = TypeVar("JobT")
T = TypeVar("T")

Pieces = Generator[None, None, T]
"""Work that yields after each piece, of 1 ms at most, and returns its result."""


class Turns(Generic[JobT]):
    """A queue of jobs by tenant. At most `seats` jobs have a turn at the same time.

    The tenant whose jobs have cost least since the queue was empty is the next one; a tenant that was away begins with
    as much as the last one that had a turn (start-time fair queueing, Goyal et al. 1996). Each tenant's jobs are FIFO.
    With two seats or more, no tenant can have all of them.
    """

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.length = 0  # the number of waiting jobs
        self._waiting: dict[str, deque[JobT]] = {}
        self._order: list[tuple[float, int, str]] = []  # a heap: what each tenant in `_waiting` has used at least
        self._numbers = count()  # of equal ones, the first that came
        self._used: dict[str, float] = {}
        self._now = 0.0  # what the last tenant that had a turn had used
        self._seated: dict[str, int] = {}  # by tenant: its jobs that have a turn
        self._taken = 0  # the sum of `_seated`

    def waiting(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def __repr__(self) -> str:
        waiting = {tenant: len(jobs) for tenant, jobs in self._waiting.items() if jobs}
        return f"Turns(waiting={waiting}, seated={self._seated})"

    def add(self, tenant: str, job: JobT) -> None:
        jobs = self._waiting.get(tenant)
        if jobs is None:
            jobs = self._waiting[tenant] = deque()
            self._queue(tenant, max(self._now, self._used.get(tenant, 0.0)))
        jobs.append(job)
        self.length += 1

    def take(self) -> tuple[str, JobT] | None:
        """Remove the next job, which has a turn until `done`; None if no job may have one."""
        most, passed_over, found = max(1, self.seats - 1), list[tuple[float, int, str]](), None
        while found is None and self._order and self._taken < self.seats:
            place = used, _, tenant = heappop(self._order)
            jobs = self._waiting[tenant]
            if not jobs:
                del self._waiting[tenant]
            elif self._used.get(tenant, 0.0) > used:
                self._queue(tenant, self._used[tenant])
            elif self._seated.get(tenant, 0) >= most:
                passed_over.append(place)
            else:
                found = tenant, jobs.popleft()
                self._now = max(self._now, used)
                self._queue(tenant, used)
        for place in passed_over:
            heappush(self._order, place)
        if found is None:
            return None
        self.length -= 1
        self._seated[found[0]] = self._seated.get(found[0], 0) + 1
        self._taken += 1
        return found

    def done(self, tenant: str) -> None:
        """End a turn of the tenant. A job that is not finished has to be added again."""
        self._taken -= 1
        self._seated[tenant] -= 1
        if not self._seated[tenant]:
            del self._seated[tenant]

    def charge(self, tenant: str, cost: float) -> None:
        """Count what the tenant's work has cost, while others wait."""
        self._used[tenant] = max(self._now, self._used.get(tenant, 0.0)) + cost

    def all_even(self) -> None:
        """Forget what was counted, because nobody waits."""
        self._used.clear()

    def remove(self, tenant: str, job: JobT) -> None:
        """Remove a waiting job. No effect on one that has a turn."""
        jobs = self._waiting.get(tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            self.length -= 1

    def expire(self, is_late: Callable[[JobT], bool], most: int) -> list[JobT]:
        """Remove and return at most `most` jobs that have waited too long, the oldest of each tenant first.

        A tenant with fewer waiting jobs than an equal part keeps them: they have their turns soon.
        """
        late: list[JobT] = []
        equal = self.length / max(1, sum(map(bool, self._waiting.values())))
        for jobs in self._waiting.values():
            if len(jobs) < equal:
                continue
            while jobs and len(late) < most and is_late(jobs[0]):
                late.append(jobs.popleft())
        self.length -= len(late)
        return late

    def _queue(self, tenant: str, used: float) -> None:
        heappush(self._order, (used, next(self._numbers), tenant))


@dataclass(slots=True, eq=False)
class Waiting:
    """A request, or a piece of long work, that waits for its turn."""

    arrived_s: float
    begin: Callable[[], object]
    refuse: Callable[[LimitError], object] | None


@dataclass(slots=True)
class _Rest:
    """After a long step, a tenant's long work rests for as long as that took, so that others have half of the loop."""

    until_s: float = 0.0
    line: asyncio.Lock = field(default_factory=asyncio.Lock)


class LoopTurns:
    """Shares the event loop's time: each pass, as much work begins as keeps it short.

    A request begins with a turn, at once (`may_begin`), later (`wait`), or in a task (`take`). A task's steps are
    charged to its tenant (`charged`), and its long work takes a turn for each slice (`go_on`).
    """

    def __init__(self) -> None:
        self._turns: Turns[Waiting] = Turns(1)
        self._active = ActiveTenants()
        self._came_s: dict[str, float] = {}  # tenants' last requests that `_active` does not know, the latest last
        self._in_pass = False  # work has begun in this pass
        self._began_s = 0.0  # CPU time at the beginning of this pass
        self._pass_s = 0.0  # when this pass began
        self._step_s = 0.0  # CPU time at the beginning of the running task's step
        self._spent_s = 0.0  # of this pass's budget, with what tasks will cost that have their turns
        self._own_s = 0.0  # the part of this pass that was charged
        self._begun = 0  # what has begun in this pass
        self._budget_s = LONG_PASS_S
        self._others_s = 0.0  # the moving average of a pass's other work
        self._task_s = LEAST_S  # the moving average of what a task does in its turn
        self._is_turn = False  # whether the running task's step is one
        self._free_s = 0.0  # the last time at which the queue was empty
        self._rests: defaultdict[str, _Rest] = defaultdict(_Rest)
        self._works: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def __repr__(self) -> str:
        return f"LoopTurns({self._turns!r})"

    def may_begin(self, tenant: str) -> bool:
        """Whether the tenant has a turn at once. Then `charge` what it costs; else `wait`."""
        if self._turns.length or self._spent_s >= self._budget_s:
            return False
        self._free_s = now_s = loop_time_s()
        self._came_s.pop(tenant, None)
        self._came_s[tenant] = now_s
        self._begun += 1
        if not self._in_pass:
            self._begin_pass()
        return True

    def charge(self, tenant: str, cost_s: float) -> None:
        """Charge CPU time of the event loop to a tenant. While no work begins, none is kept from others."""
        if self._in_pass:
            self._spent_s += cost_s
            self._own_s += cost_s
            if self._turns.length:
                self._turns.charge(tenant, cost_s)

    def wait(self, tenant: str, begin: Callable[[], object], refuse: Callable[[LimitError], object] | None) -> Waiting:
        """Have `begin` called in a turn of the tenant, or `refuse`. Raises `LimitError` if the queue is full.

        `begin` returns soon: its time is measured and charged. What has begun already has no `refuse`.
        """
        now_s = loop_time_s()
        self._came_s.pop(tenant, None)
        self._came_s[tenant] = now_s
        if self._turns.length:
            if refuse is not None:
                self._check(tenant, now_s)
        else:
            self._free_s = now_s
        waiting = Waiting(now_s, begin, refuse)
        self._turns.add(tenant, waiting)
        if not self._in_pass:
            self._begin_pass()
        return waiting

    def leave(self, tenant: str, waiting: Waiting) -> None:
        """Wait no longer."""
        self._turns.remove(tenant, waiting)

    async def take(self, tenant: str, *, may_refuse: bool = True) -> None:
        """Wait in a task for a turn of the tenant. With `may_refuse`, raises `LimitError` if it does not come soon."""
        if not self.may_begin(tenant):
            await self._turn(tenant, may_refuse=may_refuse)

    async def go_on(self, tenant: str, size: int = 0) -> None:
        """Wait for another turn if the running step of a `charged` task has used its slice, or is about to.

        `size`: the bytes that the next piece of work goes through. Long work waits for the tenant's other long work,
        and for its rest.
        """
        is_long = size > LONG_BYTES
        if not is_long and time.thread_time() - self._step_s <= SLICE_S:
            return
        rest = self._rests[tenant]
        async with rest.line if is_long or rest.until_s > loop_time_s() else nullcontext():
            if (left_s := rest.until_s - loop_time_s()) > 0:
                await asyncio.sleep(left_s)
            await self._turn(tenant, may_refuse=False)

    async def _turn(self, tenant: str, *, may_refuse: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self.wait(tenant, partial(self._let_go_on, turn), partial(_refuse, turn) if may_refuse else None)
        try:
            await turn
            self._is_turn = True
        finally:
            self.leave(tenant, waiting)

    async def run(self, tenant: str, work: Pieces[T]) -> T:
        """Do long work in slices, one of the tenant's after the other. Returns its result, or raises what it raises."""
        try:
            async with self._works[tenant]:  # several at once would each hold what they have made so far
                while True:
                    await self.go_on(tenant)
                    next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            work.close()

    @coroutine
    def charged(self, tenant: str, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await `work`, and charge each of its steps to the tenant. After a long step, its long work rests."""
        step: Callable[[], Any] = partial(work.send, None)
        try:
            while True:
                self._step_s = began_s = time.thread_time()
                try:
                    awaited = step()
                finally:
                    self._stepped(tenant, time.thread_time() - began_s)
                try:
                    step = partial(work.send, (yield awaited))
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - the work's to handle: a cancellation, most of all
                    step = partial(work.throw, error)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            del step  # breaks a reference cycle with the error of a cancellation
            work.close()

    def _stepped(self, tenant: str, cost_s: float) -> None:
        if self._in_pass:
            self.charge(tenant, cost_s)
        if cost_s > LONG_PASS_S:
            rest = self._rests[tenant]
            rest.until_s = max(rest.until_s, loop_time_s()) + cost_s
        if self._is_turn:
            self._task_s += (cost_s - self._task_s) / MEAN_OF_PASSES
            self._is_turn = False

    def _let_go_on(self, turn: asyncio.Future[None]) -> None:
        """Give a task its turn. It runs in the next pass, so what it will cost is taken from the average."""
        if not turn.done():  # a done one was cancelled with its client
            turn.set_result(None)
            self._spent_s += self._task_s

    def _check(self, tenant: str, now_s: float) -> None:
        """Raises `LimitError` if the queue is full and the tenant above its share."""
        for other, came_s in self._came_s.items():
            self._active.came(other, came_s)
        self._came_s.clear()
        share = MOST_WAITING * self._active.share(tenant, now_s)
        if self._turns.length >= MOST_WAITING and self._turns.waiting(tenant) >= share:
            raise _busy()

    def _let_begin(self) -> None:
        """Let begin what the budget allows, at least one."""
        while self._spent_s < self._budget_s and (taken := self._turns.take()) is not None:
            tenant, waiting = taken
            if not self._in_pass:
                self._begin_pass()
            self._begun += 1
            began_s = time.thread_time()
            try:
                waiting.begin()
            finally:
                self._turns.done(tenant)
                self.charge(tenant, time.thread_time() - began_s)

    def _begin_pass(self) -> None:
        """Start to measure a pass, at the first work that takes a turn or waits for one."""
        self._in_pass, self._began_s, self._pass_s = True, time.thread_time(), loop_time_s()
        asyncio.get_running_loop().call_soon(self._passed)

    def _passed(self) -> None:
        """A pass is over: set the next one's budget, and let the next work begin."""
        others_s = max(0.0, time.thread_time() - self._began_s - self._own_s)
        self._others_s += (others_s - self._others_s) / MEAN_OF_PASSES
        self._budget_s = max(LEAST_S, LONG_PASS_S - self._others_s)
        begun, self._begun, self._spent_s, self._own_s, self._in_pass = self._begun, 0, 0.0, 0.0, False
        if not self._turns.length:
            self._turns.all_even()
            return
        now_s = loop_time_s()
        if now_s - self._pass_s > STILL_S:
            self._free_s += now_s - self._pass_s
        if now_s - self._free_s > STANDING_S:
            self._refuse_late(now_s, max(1, round(REFUSED * begun)))
        self._let_begin()

    def _refuse_late(self, now_s: float, most: int) -> None:
        def is_late(waiting: Waiting) -> bool:
            return waiting.refuse is not None and now_s - waiting.arrived_s > MOST_WAIT_S

        for waiting in self._turns.expire(is_late, most):
            try:
                if waiting.refuse is not None:
                    waiting.refuse(_busy())
            except Exception:  # the others have to be answered, too
                log.exception("defect")


def _refuse(turn: asyncio.Future[None], error: LimitError) -> None:
    if not turn.done():
        turn.set_exception(error)


def _busy() -> LimitError:
    return LimitError(
        "This gateway has more requests than it can take. Send fewer a second, or ask another one.",
        code="gateway_busy",
        retry_after_s=RETRY_AFTER_S,
    )


MAX_WAITING_BYTES = 128 * 2**20
"""Four of the largest bodies. Each takes some four times its size in memory: the body, its texts, the rendered chat and
the ids."""

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

    def _ended(self, tenant: str, job: _Job, turn: asyncio.Future[tuple[float, bool, Any]]) -> None:
        self._turns.done(tenant)
        if not turn.cancelled() and turn.exception() is None:
            self._turns.charge(tenant, turn.result()[0])
        if not self._held_bytes:
            self._turns.all_even()
        if not job.result.done() and not turn.cancelled():
            error = turn.exception()
            if error is not None:
                job.result.set_exception(error)
            elif turn.result()[1]:
                job.result.set_result(turn.result()[2])
            else:
                self._turns.add(tenant, job)
        self._start()


def _advance(steps: Steps[Any]) -> tuple[float, bool, Any]:
    """One turn: its CPU time, whether the work is finished, and its result."""
    began_s = time.thread_time()
    try:
        next(steps)
    except StopIteration as end:
        return time.thread_time() - began_s, True, end.value
    return time.thread_time() - began_s, False, None


def _running(threads: int, name: str) -> Executor:
    """A pool whose threads all run already. By itself, a pool starts a thread only when jobs overlap."""
    pool, all_run = ThreadPoolExecutor(threads, thread_name_prefix=name), Barrier(threads)
    for _ in range(threads):
        pool.submit(all_run.wait)
    return pool
