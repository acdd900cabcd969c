"""Runs batches: takes those without a gateway, and sends their lines where there is room.

A batch that another gateway had goes on with the lines that have no stored answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from secrets import token_hex
from typing import Final

import structlog

from plait.gateway.api.call_api import CallApi
from plait.gateway.calls.call import DEFECT
from plait.gateway.calls.request_faults import NOT_SUPPORTED
from plait.gateway.guests.batches.batch import BatchError
from plait.gateway.guests.batches.checking import read_line
from plait.gateway.guests.batches.desk import LEASE_S, Desk, NotOwnerError
from plait.gateway.guests.batches.feeder import Feeder, SentLine
from plait.gateway.guests.batches.keeper import Keeper
from plait.gateway.guests.batches.line_call import LATER, Outcome, answered, ask, unanswered
from plait.gateway.guests.batches.running import Running
from plait.gateway.tables import TablesError, TablesThread
from plait.gateway.timer import loop_time_s
from plait.policy.admission.fair_shares import FairShares
from plait.policy.batches.line_order import LinesLeft
from plait.policy.types import CHARACTERS_PER_TOKEN

LOOK_S: Final = 1.0
"""Between two looks for batches without a gateway, and renewals of the leases."""

MOST_READY: Final = 1024
"""Behind so many answers that are not written no line of a batch is sent: the disk may be full."""

MOST_READY_BYTES: Final = 2**26
"""Behind so many bytes of such answers no line of any batch is sent."""

MOST_TRIES: Final = 3
"""A line that the only engine has failed so often has failed."""

MOST_DEATHS: Final = 3
"""A line has failed that was on an engine when so many gateways died. One death less, and it runs alone."""

FAILED_S: Final = 1.0
"""Before a line is sent again that an engine has failed."""

MOST_PAUSE_S: Final = 5.0
"""Before a line is sent again that an engine had no room for."""

LATE_AT_ONCE: Final = 64
"""So many lines of a late batch wait for their turns or run."""

MOST_REFUSED: Final = 64
"""No line of a batch is sent while so many refused ones wait: its tenant may be at a limit."""

KEY_ENDED: Final = BatchError("key_ended", "The API key by which the batch was made was revoked or has expired.")

log = structlog.get_logger(__name__)


class Runner:
    """Runs the batches of one gateway, `owner` in the tables. `serves`: whether a model is served here.

    `ended_keys` are the ids of API keys whose batches are cancelled.
    """

    def __init__(
        self,
        desk: Desk,
        thread: TablesThread,
        feeder: Feeder,
        api: Callable[[], CallApi],
        *,
        serves: Callable[[str], bool],
        weights: Mapping[str, float],
        ended_keys: Callable[[], Collection[str]],
    ) -> None:
        self.running: dict[str, Running] = {}
        self._desk = desk
        self._thread = thread
        self._feeder = feeder
        self._api = api
        self._serves = serves
        self._shares = FairShares(weights)
        self._ended_keys = ended_keys
        self._owner = token_hex(8)
        self.keeper = Keeper(desk, thread, self._owner)
        self._looked_s, self._claims_s = inf, 0.0  # the last look that the database answered, and when the next claims
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._stops = False

    def why_blocked(self, run: Running) -> str | None:
        """Why a batch does not go on: `store`, `no_engine` or `no_room`; None: it does."""
        if self._thread.problem is not None or self._desk.database.is_full:
            return "store"
        if not self._feeder.engines(run.batch.model or ""):
            return "no_engine"
        return "no_room" if run.left and not run.asked else None

    def wake(self) -> None:
        """There is a new batch, or one is cancelled."""
        self._wake.set()

    async def keep(self) -> None:
        """Run for ever: take batches, and renew the leases."""
        while True:
            with suppress(TablesError):
                await self._look()
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)

    async def _look(self) -> None:
        now_s = loop_time_s()
        if now_s > self._looked_s + LEASE_S:  # the database was away, for others too: they renew their leases first
            self._claims_s = now_s + LEASE_S
        if not self._stops and now_s >= self._claims_s:
            await self._thread.run(self._desk.claim, self._owner, time.time())
        owned = {
            batch.id: (batch, cancels)
            for batch, cancels in await self._thread.run(self._desk.renew, self._owner, time.time())
        }
        self._looked_s = loop_time_s()
        ended = self._ended_keys() if self.running else ()
        for batch_id, run in self.running.items():
            run.lost = run.lost or batch_id not in owned
            run.errors = (KEY_ENDED,) if run.batch.key in ended else ()
            run.is_cancelled = run.is_cancelled or bool(run.errors) or (batch_id in owned and owned[batch_id][1])
            run.changed.set()
        for batch_id in owned.keys() - self.running.keys() if not self._stops else ():
            run = self.running[batch_id] = Running(*owned[batch_id])
            task = asyncio.create_task(self._run(run), name=f"batch {batch_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop, so that another gateway goes on. What was answered is written."""
        self._stops = True
        for run in self.running.values():
            run.lost = True
            run.changed.set()
            for task in run.asked:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * LOOK_S)
        for run in self.running.values():
            run.stop()
            with suppress(NotOwnerError, TablesError):
                await self.keeper.write(run)
        with suppress(TablesError):
            await self._thread.run(self._desk.release, self._owner)

    async def _run(self, run: Running) -> None:
        """Run one batch until it has ended, or is another gateway's."""
        try:
            await self._until_ended(run)
        except NotOwnerError:
            log.info("batch goes on elsewhere", batch=run.batch.id)
        except Exception:
            log.exception("batch failed by a defect", batch=run.batch.id)
            with suppress(NotOwnerError):
                await self.keeper.fail(run, BatchError(DEFECT, "A defect of the gateway has ended the batch."))
        finally:
            for task in run.asked:
                task.cancel()
            if not self._stops:
                self.running.pop(run.batch.id, None)

    async def _until_ended(self, run: Running) -> None:
        begins = run.batch.status == "validating"  # one that has begun was checked before
        lines = await self.keeper.checked(run, self._serves if begins else lambda _model: True)
        if lines is None:
            return
        left = await self.keeper.unanswered(run, lines)
        run.begin(left)
        await self.keeper.save(run, run.batch)
        run.lines = lines
        writing = asyncio.create_task(self.keeper.keep_writing(run), name="batch-answers")
        try:
            while left and not (run.lost or run.is_over):
                others = [line for line in left if run.batch.cut_off.get(line, 0) < MOST_DEATHS - 1]
                for line in () if others else left:  # last: none of the others has to wait for them
                    self._begin_line(run, line, partial(self._alone, run, line, None, None))
                engines = self._feeder.engines(run.batch.model or "")
                run.left = await asyncio.to_thread(LinesLeft, lines.chains, others, engines)
                await self._feed(run)
                left = await self.keeper.unanswered(run, lines)
        finally:
            run.is_written = True
            await writing  # not cancelled: what it writes would be lost
        if not run.lost:
            await self.keeper.finish(run)

    async def _feed(self, run: Running) -> None:
        """Wait until all lines have ended, or the batch is over. `send` sends them."""
        run.began_s, run.ended = time.time(), 0
        try:
            while not run.lost and (run.left or run.asked):
                run.changed.clear()
                if run.defect is not None:
                    raise run.defect
                self._wait(run, is_waiting=run.is_sending)
                if run.is_cancelled and run.batch.status == "in_progress":
                    await self.keeper.save(run, run.batch.entered("cancelling", int(time.time()), errors=run.errors))
                if run.is_over:
                    run.left.clear()
                if run.left or run.asked:
                    await run.changed.wait()
        finally:
            self._wait(run, is_waiting=False)

    def _wait(self, run: Running, *, is_waiting: bool) -> None:
        """Whether lines of the batch wait for room has perhaps changed."""
        if run.is_waiting is not is_waiting:
            run.is_waiting = is_waiting
            (self._shares.waits if is_waiting else self._shares.left)(run.batch.identity)
            self._feeder.wake()

    async def send(self) -> None:
        """Run for ever: send lines of all batches while there is room."""
        while True:
            if self._send_some():
                await asyncio.sleep(0)  # a thousand may be sent one after the other
            else:
                await self._feeder.change(looks=bool(self.running))

    def _send_some(self) -> bool:
        """Send a line of each model that has room for one. Returns whether any was sent."""
        if sum(run.ready_bytes for run in self.running.values()) > MOST_READY_BYTES:
            return False
        by_model = defaultdict[str, list[Running]](list)
        for run in self.running.values():
            if run.is_sending and len(run.ready) < MOST_READY and run.refused < MOST_REFUSED:
                by_model[run.batch.model or ""].append(run)
        sent = [self._send_next(model, runs) for model, runs in by_model.items()]
        return any(sent)

    def _send_next(self, model: str, runs: list[Running]) -> bool:
        """Send a line of the first of a model's batches that has room or is late. Returns whether one was sent.

        The batches take turns: of the tenant that is furthest behind, the one that is due first.
        """
        now_s = loop_time_s()
        has_room = self._feeder.engine_for(model, lambda _engine: 0.0, now_s) is not None  # one question, not one each
        for run in sorted(runs, key=lambda run: (self._shares.served(run.batch.identity), run.batch.expires_at)):
            engine = self._feeder.engine_for(model, partial(_new_tokens, run), now_s) if has_room else None
            if engine is not None or (run.is_late and len(run.asked) < LATE_AT_ONCE and self._feeder.engines(model)):
                self._send(run, engine)
                return True
        return False

    def _send(self, run: Running, engine: str | None) -> None:
        """Send the next line to the engine; None: it waits for its turn as any call."""
        tokens = _new_tokens(run, engine or "") or 0.0
        assert run.lines is not None
        line = run.left.take(engine or "")
        self._shares.serve(run.batch.identity, run.lines.lengths[line])
        sent = None if engine is None else self._feeder.sent(engine, tokens, loop_time_s())
        self._begin_line(run, line, partial(self._line, run, sent, line))

    def _begin_line(self, run: Running, line: int, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._contained(run, line, work), name="batch-line")
        run.asked.add(task)
        task.add_done_callback(partial(_line_ended, run))

    async def _contained(self, run: Running, line: int, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work of a line. A defect fails this line only."""
        try:
            await work()
        except NotOwnerError:
            raise
        except Exception:
            log.exception("a line failed by a defect", batch=run.batch.id, line=line)
            await self._give_up(run, line, "A defect of the gateway has ended the line.", None)

    async def _line(self, run: Running, sent: SentLine | None, line: int) -> None:
        """Send one line, as `ask` does. Its answer is written, or the line comes again."""
        outcome = await self._outcome(run, sent, line)
        if outcome is None:
            return
        if outcome.status not in LATER:
            await asyncio.sleep(FAILED_S)
            await self._alone(run, line, None if sent is None else sent.engine, outcome, tries=1)
            return
        assert run.lines is not None
        self._shares.correct(run.batch.identity, -run.lines.lengths[line])
        run.refused += 1
        try:
            await asyncio.sleep(_pause_s(outcome))
        finally:
            run.refused -= 1
        run.left.give_back(line)
        self._feeder.wake()

    async def _alone(
        self, run: Running, line: int, failed_on: str | None, last: Outcome | None, tries: int = 0
    ) -> None:
        """Run a line with no other line beside it, since it may be what kills engines, or gateways.

        An engine has failed it, and this was its `last` answer; None: gateways have died with it. The line has failed
        after a second engine, after `MOST_TRIES` where there is only one, or with `MOST_DEATHS`.
        """
        model = run.batch.model or ""
        while tries < MOST_TRIES and run.batch.cut_off.get(line, 0) < MOST_DEATHS:
            async with self._feeder.alone(model, failed_on or "", lambda: run.lost or run.is_over) as engine:
                if engine is None:
                    return
                assert run.lines is not None
                tokens = run.lines.lengths[line] / CHARACTERS_PER_TOKEN
                outcome = await self._outcome(run, self._feeder.sent(engine, tokens, loop_time_s()), line)
                if outcome is None:
                    return
                if outcome.status not in LATER:
                    tries = tries + 1 if failed_on in (None, engine) else MOST_TRIES
                    failed_on, last = engine if failed_on is None else failed_on, outcome
                    await asyncio.sleep(FAILED_S)  # others that wait for it come no sooner
            if outcome.status in LATER:
                await asyncio.sleep(_pause_s(outcome))
        message = "The line has failed again and again: engines have failed it, or gateways have died with it."
        await self._give_up(run, line, message, last)

    async def _give_up(self, run: Running, line: int, message: str, last: Outcome | None) -> None:
        read = read_line(await self.keeper.line(run, line))
        ended = unanswered(read, f"batch_req_{token_hex(12)}", "line_failed", message, last)
        self.keeper.answered(run, line, True, ended)

    async def _outcome(self, run: Running, sent: SentLine | None, line: int) -> Outcome | None:
        """Send a line. Returns what it has come to, or None if that is its answer."""
        try:
            read, request_id = read_line(await self.keeper.line(run, line)), f"batch_req_{token_hex(12)}"
            await self.keeper.mark(run, line)
            outcome = await ask(self._api(), run.batch, read, request_id, None if sent is None else sent.engine)
        finally:
            run.sent.discard(line)
            self._feeder.ended(sent)
        if outcome.status in LATER or (outcome.status >= 500 and outcome.status != NOT_SUPPORTED):
            return outcome
        self.keeper.answered(run, line, outcome.status >= 400, answered(read, request_id, outcome), outcome.body)
        self._feeder.wake()
        return None


def _line_ended(run: Running, task: asyncio.Task[None]) -> None:
    run.asked.discard(task)
    if not task.cancelled():
        run.defect = task.exception() or run.defect
    run.changed.set()


def _pause_s(outcome: Outcome) -> float:
    """How long a refused line waits until it is sent again."""
    return min(outcome.retry_after_s, MOST_PAUSE_S)


def _new_tokens(run: Running, engine: str) -> float | None:
    """About how many tokens of the engine's next line no line there has had just before; None: none is left."""
    line = run.left.next(engine)
    if line is None or run.lines is None:
        return None
    return (run.lines.lengths[line] - run.left.shared_bytes(engine, line)) / CHARACTERS_PER_TOKEN
