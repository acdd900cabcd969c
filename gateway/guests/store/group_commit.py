"""Group commit: one thread writes the log, and each commit has all that was appended during the one before.

The event loop appends batches of changes and does not wait. Before an answer that promises durability goes to a client,
its task awaits `committed`. The invariants:

- Batches are written in the order of their `append`, each as a whole. So of each stream the store has a prefix.
- While the log cannot be written, the thread retries the same commit each `RETRY_S`. Later batches queue up to
  `max_backlog_bytes`. Beyond that, a stream loses the new event and all later ones, so that the prefix has no gap.
  `committed` returns False at once.
- A batch whose data the database refuses is left out alone (`SplitWriter`), and its streams are cut there.
- After the lease is lost, nothing is written until `reopen`.

Waking a thread costs the loop a system call and the GIL, just when it sends the calls that a value has made ready. So a
sleeping thread is woken `LOOK_S` later, and a busy one polls each `LOOK_S`. `run` does other work of the keeper in the
thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import structlog

from plait.gateway.guests.store.event_log import Keeper, LeaseLostError, RefusedDataError, StoreError, StoreVersionError
from plait.gateway.guests.store.jobs import Jobs
from plait.gateway.guests.store.split_writer import SplitWriter
from plait.gateway.guests.store.waiters import Waiters
from plait.gateway.streams import Change, StoredStream, StreamKey

LOOK_S: Final = 0.01
"""The delay before the thread looks for new batches. Only clients that wait for a commit see it; a dependent call is
sent 0.6 ms after the answer that it waited for. A commit costs a quarter of a millisecond of CPU, with one value or
twenty, so fewer commits leave more of the core to the event loop.
"""

RETRY_S: Final = 1.0
"""Between two attempts to take the lease or to write. Clients are asked to retry after as long."""

LONGEST_S: Final = 3600.0
"""The longest sleep of a thread without work."""

TIDY_S: Final = 1.0
"""How soon after the last write deleted data is removed from the file. A checkpoint takes some milliseconds."""

STALLED_S: Final = 5.0
"""A commit that takes longer counts as a failing store. A disk takes some milliseconds, a busy one a second."""

BATCH_BYTES: Final = 2**22
"""The most bytes of one commit: some 10 ms of writing."""

CHANGE_BYTES: Final = 256
"""The memory of a change besides its data."""

T = TypeVar("T")

Batch = tuple[Sequence[Change], int]
"""Changes that are written as a whole, and their size in memory in bytes."""

log = structlog.get_logger(__name__)


class GroupCommit:
    """Writes to a `keeper`'s log from `start` to `close`. Public methods are called by the event loop.

    `on_lost` is called after the lease is lost, and has to call `reopen`. Without it, the log is closed then.
    """

    def __init__(self, keeper: Keeper, max_backlog_bytes: int = 64 * 2**20) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.cpu_s = 0.0
        """CPU time of the thread so far."""
        self.writer = SplitWriter()
        self._keeper = keeper
        self._max_backlog_bytes = max_backlog_bytes
        self._queue = deque[Batch]()
        self.jobs = Jobs()
        self._may_reopen = threading.Event()
        self._wake = threading.Event()
        self._sleeps = self._wakes_soon = False
        self._appended = self._committed = 0  # numbers of batches
        self._appended_bytes = self._committed_bytes = 0
        self._lost: set[StreamKey] = set()
        self._waiters = Waiters()
        self._problem: str | None = None
        self._is_stalled = False
        self._is_watched = False
        self._is_open = False
        self._stops = threading.Event()
        self._streams: asyncio.Future[list[StoredStream]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)

    def __repr__(self) -> str:
        return f"GroupCommit({self._keeper!r}, backlog={self._appended - self._committed}, problem={self._problem!r})"

    @property
    def problem(self) -> str | None:
        """Why nothing can be stored at present."""
        if self._problem is None and self._is_stalled:
            return f"a commit takes longer than {STALLED_S:g} s"
        if self._problem is None and self.jobs.is_late(STALLED_S):  # a pooler waits for a database that is away
            return f"no answer for {STALLED_S:g} s"
        return self._problem

    @property
    def backlog_bytes(self) -> int:
        return self._appended_bytes - self._committed_bytes

    @property
    def is_started(self) -> bool:
        return self._streams is not None

    def start(self) -> None:
        """Start the thread: it waits for the lease, reads the log, then writes."""
        self._loop = asyncio.get_running_loop()
        self._streams = self._loop.create_future()
        self._thread.start()

    async def streams(self) -> list[StoredStream]:
        """Wait for the lease. Returns what the log had then."""
        assert self._streams is not None, "it is started first"
        return await asyncio.shield(self._streams)

    def append(self, changes: Sequence[Change]) -> None:
        """Append one batch. Returns at once; the commit follows."""
        batch = changes
        if self._lost or self.backlog_bytes > self._max_backlog_bytes:
            batch = [change for change in changes if not self._is_lost(change)]
        if batch:
            size_bytes = _size_bytes(batch)
            self._appended += 1
            self._appended_bytes += size_bytes
            self._queue.append((batch, size_bytes))
            if self._sleeps or not self._is_watched:
                self._notice()

    async def committed(self, stream: StreamKey) -> bool:
        """Wait until all that was appended is stored. False if it cannot be, or if the stream has lost an event."""
        if not self._is_open or self.problem is not None or stream in self._lost:
            return False
        if self._committed >= self._appended:
            return stream not in self.writer.cut
        waiter = self._waiters.add(self._appended)
        self._settle()  # the thread may have committed, and found no waiter, just before this one was added
        return await waiter and stream not in self._lost and stream not in self.writer.cut

    async def run(self, work: Callable[[], T]) -> T:
        """Do `work` in the thread, once all that was appended is written. Raises `StoreError` if that fails."""
        assert self._loop is not None, "it is started first"
        done = self.jobs.add(work, self._appended)
        self._wake.set()
        result: T = await done
        return result

    def reopen(self) -> None:
        """Take a new lease after the old one was lost. Drops what was appended and not written."""
        assert self._loop is not None
        self._queue.clear()
        self._lost.clear()
        self.writer.forget()
        self._committed, self._committed_bytes = self._appended, self._appended_bytes
        self._streams = self._loop.create_future()
        self._may_reopen.set()

    async def close(self) -> None:
        """Write what is left, and release the lease."""
        self._stops.set()
        self._wake.set()
        self._may_reopen.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self._settle()

    def _notice(self) -> None:
        """Schedule the thread's wake-up, and a check that it commits within `STALLED_S`."""
        loop = self._loop
        if loop is None:
            return
        if self._sleeps and not self._wakes_soon:
            self._wakes_soon = True
            loop.call_later(LOOK_S, self._wake_up)
        if not self._is_watched:
            self._is_watched = True
            loop.call_later(STALLED_S, self._look, self._appended)

    def _wake_up(self) -> None:
        self._wakes_soon = False
        self._wake.set()

    def _look(self, number: int) -> None:
        self._is_watched = False
        if self._committed < number:
            self._is_stalled = True
            self._settle()
        elif self._committed < self._appended:
            self._notice()

    def _is_lost(self, change: Change) -> bool:
        """Whether a change is dropped: the backlog is full, or its stream has lost an earlier event."""
        if change.data is None:
            self._lost.discard(change.stream)
            return False
        if self.backlog_bytes > self._max_backlog_bytes:
            self._lost.add(change.stream)
        return change.stream in self._lost

    def _settle(self) -> None:
        """Wake the waiters whose batches are committed; if nothing can be stored, all of them."""
        if self._committed >= self._appended:
            self._is_stalled = False
        self._waiters.tell(self._committed, is_over=self.problem is not None or not self._thread.is_alive())

    # What follows runs in the thread.

    def _work(self) -> None:
        try:
            self._hold()
            while self.on_lost is not None and self._loop is not None and not self._stops.is_set():
                self._may_reopen.clear()
                with suppress(RuntimeError):  # the loop may have ended meanwhile
                    self._loop.call_soon_threadsafe(self.on_lost)
                while not (self._may_reopen.wait(RETRY_S) or self._stops.is_set()):
                    pass
                self._hold()
        except StoreVersionError as error:
            self._failed(str(error))
        finally:
            self._problem = self._problem or "the store is closed"
            self._keeper.close()
            self._tell()
            self.jobs.give_up(self._problem)

    def _hold(self) -> None:
        """Take the lease, and write until it is lost or the log is closed."""
        try:
            self._read(self._opened())
            self._write()
        except LeaseLostError as error:
            self._is_open = False
            self._failed(str(error))

    def _opened(self) -> list[StoredStream] | None:
        """Take the lease, however long it takes, and read. None if the log is closed before."""
        while not self._stops.is_set():
            try:
                self._keeper.open()
                return list(self._keeper.read())
            except LeaseLostError:
                raise
            except StoreError as error:
                self._failed(str(error))
            self._stops.wait(RETRY_S)
        return None

    def _read(self, streams: list[StoredStream] | None) -> None:
        if streams is not None and self._loop is not None and self._streams is not None:
            self._problem, self._is_open = None, True
            with suppress(RuntimeError):  # the loop may have ended meanwhile
                self._loop.call_soon_threadsafe(self._streams.set_result, streams)

    def _write(self) -> None:
        tidied_s, is_tidy = time.monotonic(), True
        while self._is_open:
            is_last, batches = self._stops.is_set(), _taken(self._queue)
            if batches:
                self._commit(batches)
                is_tidy = False
            elif is_last:
                break
            self._do_jobs()
            now_s = time.monotonic()
            if not is_tidy and (not batches or now_s - tidied_s > 10 * TIDY_S):
                self._keeper.tidy()
                is_tidy, tidied_s = True, now_s
            self.cpu_s = time.thread_time()
            if len(batches) > 1:
                time.sleep(LOOK_S)
            else:
                self._sleep(LONGEST_S if is_tidy else TIDY_S)
        self._keeper.tidy()

    def _sleep(self, longest_s: float) -> None:
        self._wake.clear()
        self._sleeps = True
        if not (self._queue or self.jobs or self._stops.is_set()):  # a later append sees `_sleeps` and sets `_wake`
            self._wake.wait(min(self.jobs.pause_s, longest_s))
        self._sleeps = False

    def _commit(self, batches: list[Batch]) -> None:
        """Write the batches, without those that are refused. Retries until it succeeds, or once more when closing."""
        try:
            self.writer.write([batch for batch, _ in batches], self._try)
        except LeaseLostError:
            raise
        except StoreError:
            return
        self._well()
        self._committed_bytes += sum(size_bytes for _, size_bytes in batches)
        self._committed += len(batches)
        self._tell()

    def _try(self, changes: Sequence[Change]) -> None:
        """Make one commit, with retries. Raises `LeaseLostError`, `RefusedDataError`, or `StoreError` when closing."""
        again = False
        while True:
            try:
                self._keeper.write(changes, again=again)
                break
            except (LeaseLostError, RefusedDataError):
                raise
            except StoreError as error:
                self._failed(str(error))
                if self._stops.wait(RETRY_S):
                    raise
                again = True

    def _do_jobs(self) -> None:
        """Do the work of `run`, and the regular job if it is due."""
        for job in self.jobs.due(self._committed):
            try:
                result = job.work()
            except LeaseLostError as error:
                job.fail(error)
                raise
            except RefusedDataError as error:
                self.jobs.refuse(job, error)
            except StoreError as error:
                self._failed(str(error))
                job.fail(error)
            else:
                self._well()
                job.succeed(result)

    def _well(self) -> None:
        if self._problem is not None:
            log.info("the store is written again")
        self._problem = None

    def _failed(self, problem: str) -> None:
        if problem != self._problem:
            log.error("the store cannot be used: what comes now is in memory only", problem=problem)
        self._problem = problem
        self.jobs.give_up(problem)
        self._tell()

    def _tell(self) -> None:
        """Have the loop wake the waiters. Without any, the loop is not disturbed."""
        if (self._waiters or self._is_stalled) and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._settle)


def _taken(queue: deque[Batch]) -> list[Batch]:
    """The oldest batches, up to `BATCH_BYTES` and at least one."""
    batches, size_bytes = list[Batch](), 0
    while queue and size_bytes < BATCH_BYTES:
        batches.append(queue.popleft())
        size_bytes += batches[-1][1]
    return batches


def _size_bytes(changes: Sequence[Change]) -> int:
    if len(changes) == 1:
        return CHANGE_BYTES + len(changes[0].data or b"")
    return sum(CHANGE_BYTES + len(change.data or b"") for change in changes)
