"""A thread that writes a log: what has come while it wrote goes into its next commit, so one disk serves thousands.

The event loop appends changes and goes on. Whoever tells a client of something waits for `committed` first. Changes are
written in the order in which they came, each `append` as a whole. While many changes come, the thread looks for them by
itself, each `LOOK_S`. To wake a thread costs the loop a system call, and the interpreter's lock, just when it sends the
calls that a value has made ready; so a thread that sleeps is woken `LOOK_S` later.

If the log cannot be written, the thread tries again each `RETRY_S`, with the same changes. What comes meanwhile waits,
up to `max_backlog_bytes`. Beyond that a stream loses its end: its later events are left out, too, so that what is
stored of it is always a beginning. `committed` says at once that nothing is stored for now. An append whose data the
log refuses is no such failure: it alone is left out (`SplitWriter`).

A log that several gateways share asks more of its keeper: `run` does it in the thread. If the lease is lost, nothing is
written any more until `reopen`.
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

from plait.gateway.store.event_log import (
    Change,
    Keeper,
    LeaseLostError,
    RefusedDataError,
    StoredStream,
    StoreError,
    StoreVersionError,
    StreamKey,
)
from plait.gateway.store.jobs import Jobs
from plait.gateway.store.split_writer import SplitWriter
from plait.gateway.store.waiters import Waiters

LOOK_S: Final = 0.01
"""A call is at its engine 0.6 ms after the answer that it waited for, and nobody notices this with a value. A commit
takes a quarter of a millisecond of a core that does other things, and so do twenty values in one.
"""

RETRY_S: Final = 1.0
"""Between two attempts to take the lease, or to write to a disk that fails: a client is asked to wait as long."""

LONGEST_S: Final = 3600.0
"""A thread without work sleeps so long at a time."""

TIDY_S: Final = 1.0
"""What was deleted is out of the file after so long, if it is asked for; a checkpoint takes some milliseconds."""

STALLED_S: Final = 5.0
"""A commit that takes longer is not waited for: a disk takes some milliseconds, a busy one a second."""

BATCH_BYTES: Final = 2**22
"""In one commit: some 10 ms of writing, which the next one waits for."""

CHANGE_BYTES: Final = 256
"""What a change takes besides its data."""

T = TypeVar("T")

Batch = tuple[Sequence[Change], int]
"""What is written as a whole, and what it takes in memory, in bytes."""

log = structlog.get_logger(__name__)


class GroupCommit:
    """Writes to a `keeper`'s log from `start` to `close`. All other methods are the event loop's.

    `on_lost` is called if another gateway has taken over what this one had, and calls `reopen`. Without it, the log is
    closed then.
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
        self._appended = self._committed = 0  # batches
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
        """Why nothing is stored for now; None if all is well."""
        if self._problem is None and self._is_stalled:
            return f"a commit takes longer than {STALLED_S:g} s"
        return self._problem

    @property
    def backlog_bytes(self) -> int:
        return self._appended_bytes - self._committed_bytes

    @property
    def is_started(self) -> bool:
        return self._streams is not None

    def start(self) -> None:
        """Begin: wait for the lease, read, then write."""
        self._loop = asyncio.get_running_loop()
        self._streams = self._loop.create_future()
        self._thread.start()

    async def streams(self) -> list[StoredStream]:
        """What the log held when its lease was taken. Waits for that."""
        assert self._streams is not None, "it is started first"
        return await asyncio.shield(self._streams)

    def append(self, changes: Sequence[Change]) -> None:
        """Write these, after all that came before. Returns at once."""
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
        """Wait until all that was appended is stored. False if it is not, or not all of the stream."""
        if not self._is_open or self.problem is not None or stream in self._lost:
            return False
        if self._committed >= self._appended:
            return stream not in self.writer.cut
        waiter = self._waiters.add(self._appended)
        self._settle()  # the thread looks for waiters after it has committed, and may have done so just now
        return await waiter and stream not in self._lost and stream not in self.writer.cut

    async def run(self, work: Callable[[], T]) -> T:
        """Do `work` in the thread, once all that was appended is written. Raises `StoreError` if that fails."""
        assert self._loop is not None, "it is started first"
        done = self.jobs.add(work, self._appended)
        self._wake.set()
        result: T = await done
        return result

    def reopen(self) -> None:
        """The lease was lost, and all that depended on it is gone: take another one. What was not written never is."""
        assert self._loop is not None
        self._queue.clear()
        self._lost.clear()
        self.writer.forget()
        self._committed, self._committed_bytes = self._appended, self._appended_bytes
        self._streams = self._loop.create_future()
        self._may_reopen.set()

    async def close(self) -> None:
        """Write what is left, and give the lease up."""
        self._stops.set()
        self._wake.set()
        self._may_reopen.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self._settle()

    def _notice(self) -> None:
        """Something has come: see to it that the thread is awake soon, and that it is not stalled for long."""
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
        """Whether a change is left out, because there is no room for it or for one before it in its stream."""
        if change.data is None:
            self._lost.discard(change.stream)
            return False
        if self.backlog_bytes > self._max_backlog_bytes:
            self._lost.add(change.stream)
        return change.stream in self._lost

    def _settle(self) -> None:
        """Tell those whose changes are committed, or all of them that they are not."""
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
        """Take the lease, and write until it is lost or the end comes."""
        try:
            self._read(self._opened())
            self._write()
        except LeaseLostError as error:
            self._is_open = False
            self._failed(str(error))

    def _opened(self) -> list[StoredStream] | None:
        """Take the lease, however long that takes; None if the end comes first."""
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
        if not (self._queue or self.jobs or self._stops.is_set()):  # whoever appends later sees that the thread sleeps
            self._wake.wait(min(self.jobs.pause_s, longest_s))
        self._sleeps = False

    def _commit(self, batches: list[Batch]) -> None:
        """Write these, but for what is refused, however often that has to be tried. At the end it is tried once."""
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
        """Make one commit, however often that has to be tried. Raises `StoreError` if trying again is no use."""
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
        """Do what `run` was asked for, and what is due."""
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
        """Let the loop tell those that wait. Without any it is not woken."""
        if (self._waiters or self._is_stalled) and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._settle)


def _taken(queue: deque[Batch]) -> list[Batch]:
    """What has come first, up to `BATCH_BYTES`."""
    batches, size_bytes = list[Batch](), 0
    while queue and size_bytes < BATCH_BYTES:
        batches.append(queue.popleft())
        size_bytes += batches[-1][1]
    return batches


def _size_bytes(changes: Sequence[Change]) -> int:
    if len(changes) == 1:
        return CHANGE_BYTES + len(changes[0].data or b"")
    return sum(CHANGE_BYTES + len(change.data or b"") for change in changes)
