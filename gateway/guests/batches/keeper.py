"""Reads the lines of batches and keeps their answers, however long the database takes.

Nothing of a batch is written once it has another owner.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import reduce
from secrets import token_hex
from typing import Final, ParamSpec, TypeVar

import msgspec
import structlog

from plait.gateway.guests.batches.batch import Batch, BatchError, Status
from plait.gateway.guests.batches.checking import MOST_LINES, CheckedLines, read_line
from plait.gateway.guests.batches.desk import PART_BYTES, Desk, FileRecord, LineAnswer, NotOwnerError, at_once
from plait.gateway.guests.batches.line_call import unanswered, usage_of
from plait.gateway.guests.batches.running import Running
from plait.gateway.tables import TablesError, TablesThread

AGAIN_S: Final = 1.0
"""Before the database is asked again that did not answer."""

WRITE_S: Final = 0.1
"""How long an answer waits for others, to be written with them."""

AT_ONCE: Final = 64
"""As many answers are written without waiting."""

READS: Final = 8
"""So many lines are read at once: behind them wait answers and the renewal of leases."""

LAST: Final[dict[Status, Status]] = {"cancelling": "cancelled", "finalizing": "completed", "in_progress": "expired"}
"""How a batch ends, by its state before."""

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)


class Keeper:
    """Keeps what the batches of one gateway come to, which is `owner` in the tables.

    What waits for the database raises `NotOwnerError`.
    """

    def __init__(self, desk: Desk, thread: TablesThread, owner: str) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """Lines that have ended, by model and outcome."""
        self._desk = desk
        self._thread = thread
        self._owner = owner
        self._reading = asyncio.Semaphore(READS)
        self._checking = asyncio.Lock()  # one file at a time: each takes a core, and memory

    async def checked(self, run: Running, serves: Callable[[str], bool]) -> CheckedLines | None:
        """The lines of the batch's file, and the batch begins; None: it has failed."""
        batch, part = run.batch, 0
        lines = CheckedLines(batch.endpoint, MOST_LINES, serves)
        async with self._checking:
            while not lines.is_done and (data := await self._patiently(self._desk.part, batch.input_file_id, part)):
                await asyncio.to_thread(lines.feed, data)
                part += 1
            await asyncio.to_thread(lines.end)
        if batch.status != "validating":
            return lines
        now = int(time.time())
        if lines.errors:
            failed = batch.entered("failed", now, errors=tuple(lines.errors), model=lines.model)
            await self.save(run, failed)
            return None
        await self.save(run, batch.entered("in_progress", now, model=lines.model, total=len(lines)))
        return lines

    async def unanswered(self, run: Running, lines: CheckedLines) -> list[int]:
        """The lines without a stored answer, once all answers are stored. The batch counts those."""
        await self.save(run, run.batch)
        done = dict(await self._patiently(self._desk.answered, run.batch.id))
        failed = sum(done.values())
        run.batch = msgspec.structs.replace(run.batch, completed=len(done) - failed, failed=failed)
        return [line for line in range(len(lines)) if line not in done]

    async def line(self, run: Running, line: int) -> bytes:
        """The text of a line."""
        assert run.lines is not None
        begin = run.lines.begins[line]
        end = begin + run.lines.lengths[line]
        async with self._reading:
            return await self._patiently(self._desk.read, run.batch.input_file_id, begin, end)

    async def mark(self, run: Running, line: int) -> None:
        """Note that a line is sent; in the database if gateways have died with the batch, as the line may be why."""
        run.sent.add(line)
        if run.batch.deaths > 1:
            await self._again_and_again(lambda: self.write(run, marked=line))

    def answered(self, run: Running, line: int, failed: bool, data: bytes, body: bytes = b"") -> None:
        """A line has ended with `data`, which is to be written; `body` is its answer, if there is one."""
        answer = LineAnswer(line, failed, data, usage_of(body))
        run.batch = run.batch.counted(answer.failed, answer.used)
        run.ready.append(answer)
        run.ready_bytes += len(data)
        run.ended += 1
        self.counts[run.batch.model or "", "failed" if failed else "completed"] += 1

    async def keep_writing(self, run: Running) -> None:
        """Write answers as they come, until the batch `is_written`."""
        while not run.is_written:
            await asyncio.sleep(WRITE_S if len(run.ready) < AT_ONCE else 0)
            if run.ready:
                try:
                    await self.write(run)
                except NotOwnerError:
                    run.lost = True
                except TablesError:
                    await asyncio.sleep(AGAIN_S)

    async def write(self, run: Running, *, marked: int | None = None) -> None:
        """Write the answers that are ready, and with the last the batch's state. Raises `TablesError`; the rest stays.

        Nothing is done if it is written already that the `marked` line is sent.
        """
        async with run.writing:
            are_all = marked in run.saved.sent
            while not are_all:
                some = run.ready[: at_once(len(answer.data) for answer in run.ready)]
                are_all = len(some) == len(run.ready)
                counted = run.batch
                if not are_all:
                    counted = reduce(lambda batch, answer: batch.counted(answer.failed, answer.used), some, run.saved)
                batch = msgspec.structs.replace(counted, sent=tuple(run.sent))
                await self._thread.run(self._desk.save, self._owner, batch, some)
                run.saved = batch
                del run.ready[: len(some)]
                run.ready_bytes -= sum(len(answer.data) for answer in some)

    async def save(self, run: Running, batch: Batch) -> None:
        """Write another state of the batch, with all answers so far."""
        run.batch = batch
        await self._again_and_again(lambda: self.write(run))

    async def finish(self, run: Running) -> None:
        """Make the files of the answers, and end the batch."""
        batch, now = run.batch, int(time.time())
        has_expired = "expired" in batch.at or batch.completed + batch.failed < batch.total
        if batch.status == "cancelling":
            await self._give_up_rest(run, "batch_cancelled")
        elif batch.status == "in_progress" and has_expired:
            run.batch = msgspec.structs.replace(batch, at={**batch.at, "expired": now})  # whoever ends it
            await self._give_up_rest(run, "batch_expired")
        elif batch.status == "in_progress":
            run.batch = batch.entered("finalizing", now)
        await self.save(run, run.batch)
        files = [record for failed in (False, True) if (record := await self._file(run, failed=failed)) is not None]
        named = {"error_file_id" if record.id.endswith("-errors") else "output_file_id": record.id for record in files}
        last = LAST[run.batch.status]
        ended = run.batch.entered(last, int(time.time()), **named)
        await self._end(ended, files)
        log.info("batch ended", batch=ended.id, status=last, completed=ended.completed, failed=ended.failed)

    async def fail(self, run: Running, error: BatchError) -> None:
        """End a batch by an error, without a file of its answers."""
        failed = run.batch.entered("failed", int(time.time()), errors=(error,))
        await self._end(failed, ())

    async def _end(self, ended: Batch, files: Sequence[FileRecord]) -> None:
        await self._patiently(self._desk.end, self._owner, ended, files)
        while await self._patiently(self._desk.clear, ended.id):
            pass

    async def _give_up_rest(self, run: Running, code: str) -> None:
        """Each line without an answer gets an error."""
        assert run.lines is not None
        await self.save(run, run.batch)
        done = dict(await self._patiently(self._desk.answered, run.batch.id))
        message = "The batch was cancelled." if code == "batch_cancelled" else "The batch's window was over."
        for line in range(len(run.lines)):
            if line in done:
                continue
            read = read_line(await self.line(run, line))
            self.answered(run, line, True, unanswered(read, f"batch_req_{token_hex(12)}", code, message))
            if len(run.ready) >= AT_ONCE:
                await self.save(run, run.batch)

    async def _file(self, run: Running, *, failed: bool) -> FileRecord | None:
        """Write the answers that have failed, or the others, as a file; None: there are none."""
        batch, kind = run.batch, "errors" if failed else "output"
        if not (batch.failed if failed else batch.completed):
            return None
        file_id, part, held = f"file-{batch.id.removeprefix('batch_')}-{kind}", 0, bytearray()
        async for data in self._answers(batch.id, failed=failed):
            held += data + b"\n"
            while len(held) >= PART_BYTES:
                await self._patiently(self._desk.put_part, file_id, part, bytes(held[:PART_BYTES]))
                part += 1
                del held[:PART_BYTES]  # copies nothing
        await self._patiently(self._desk.put_part, file_id, part, bytes(held))
        now, kept_s = int(time.time()), batch.output_expires_in_s
        return FileRecord(
            file_id, f"{batch.id}_{kind}.jsonl", "batch_output", now, None if kept_s is None else now + kept_s,
            part * PART_BYTES + len(held),
        )  # fmt: skip

    async def _answers(self, batch_id: str, *, failed: bool) -> AsyncIterator[bytes]:
        after = -1
        while found := await self._patiently(self._desk.answers, batch_id, after, failed=failed):
            for answer in found:
                yield answer.data
            after = found[-1].line

    async def _patiently(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns once the database answers."""
        return await self._again_and_again(lambda: self._thread.run(work, *args, **kwargs))

    async def _again_and_again(self, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await work()
            except TablesError:
                await asyncio.sleep(AGAIN_S)
